"""The programs of docs/gpu.md and the benchmark of cards."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.emulated_cards import EMULATED
from tests.gpu.cards import Cards
from tests.process.scripts import ROOT, blocks, run_python

PAGE = ROOT / "docs" / "gpu.md"


def run(folder: Path, emulated: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EMULATED)] * emulated + [str(ROOT)]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    strict = ["-W", "error"] * emulated
    return run_python(*strict, *arguments, cwd=folder, env=env, timeout=600)


@pytest.mark.thorough
@pytest.mark.timeout(610)
@pytest.mark.parametrize("number", [0, 1])
def test_program_prints_what_its_page_shows(number: int, cards: Cards, tmp_path: Path) -> None:
    programs = [text for text in blocks(PAGE, "python") if "Master(" in text]
    text, shown = programs[number], blocks(PAGE, "text")[number]
    if not cards.real:  # ONNX Runtime's CPU provider may serve
        plain, changed = 'devices=["cuda:0", "cuda:0"]', "allow_fallback=True"
        assert plain in text
        if "EngineOptions(" in text:
            text = text.replace("EngineOptions(", f"EngineOptions({changed}, ")
        else:
            text = text.replace(plain, f"{plain}, options=mcinfer.EngineOptions({changed})")
    ended = run(tmp_path, not cards.real, "-c", text)
    assert ended.returncode == 0, ended.stderr
    assert cards.real or ended.stderr == ""  # on a card, ONNX Runtime may warn
    assert ended.stdout == shown


@pytest.mark.thorough
@pytest.mark.timeout(610)
def test_benchmark_comes_to_its_end(cards: Cards, tmp_path: Path) -> None:
    program = str(ROOT / "benchmarks" / "gpu.py")
    how = "--quick" if cards.real else "--emulated"
    ended = run(tmp_path, not cards.real, program, how, "--rounds", "2")
    assert ended.returncode == 0, ended.stderr
    assert ("NO CARD" in ended.stdout) is not cards.real
    kills = [
        line
        for line in ended.stdout.splitlines()
        if "| the first |" in line or "| the last |" in line
    ]
    assert [line.split(" | ")[4:6] for line in kills] == [["0 (met)", "0 (met)"]] * 4
