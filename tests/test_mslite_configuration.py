"""Tests of mcinfer/mslite/_configuration.py: sections of entries, from files and dictionaries."""

import warnings
from pathlib import Path

import pytest

from mcinfer.errors import InvalidInputError
from mcinfer.mslite._configuration import (
    Sections,
    load_sections,
    warn_of_unused,
    weights_folder,
)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.ini"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("", {}),
        ("[empty]\n", {"empty": {}}),
        ("[a]\nkey=value\n[b]\nkey=other\n", {"a": {"key": "value"}, "b": {"key": "other"}}),
        ("[a]\n key  =  some value \n", {"a": {"key": "some value"}}),
        ("[a]\nkey: value\n", {"a": {"key": "value"}}),
        ("[a]\nkey=\"some value\"\nother=' x '\n", {"a": {"key": "some value", "other": " x "}}),
        ("[a]\nkey='it\"\nquote='\n", {"a": {"key": "'it\"", "quote": "'"}}),
        ("# of it all\n[a]\n# of one\nkey=value # of a line\n", {"a": {"key": "value"}}),
        ("[a]\nKey=Value\nkey=value\n", {"a": {"Key": "Value", "key": "value"}}),
        ("[a]\nkey=1\n[a]\nkey=2\nmore=3\n", {"a": {"key": "2", "more": "3"}}),
        ("[a]\nkey=1\nkey=2\n", {"a": {"key": "2"}}),
        ("[a]\nkey=50%(x)s\n", {"a": {"key": "50%(x)s"}}),
        ("[a]\nkey=\n", {"a": {"key": ""}}),
        ("[a]\npath=/ä/b=c\n", {"a": {"path": "/ä/b=c"}}),
    ],
)
def test_file_is_read_as_sections(tmp_path: Path, text: str, sections: Sections) -> None:
    assert load_sections(written(tmp_path, text), None) == sections


@pytest.mark.parametrize("text", ["key=value\n", "[a]\nno value\n", "[a\nkey=1\n"])
def test_file_that_is_no_such_file_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidInputError, match=f"^config_path: {path} does not load: "):
        load_sections(path, None)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.ini"
    path.write_bytes(b"[a]\nkey=\xff\n")
    for bad in (path, tmp_path):
        with pytest.raises(InvalidInputError, match="does not load"):
            load_sections(str(bad), None)


def test_dictionary_overrides_the_file_entry_by_entry(tmp_path: Path) -> None:
    path = written(tmp_path, "[a]\nkey=file\nkept=file\n")
    more = {"a": {"key": " 'given' "}, "b": {"key": "x"}}
    assert load_sections(path, more) == {
        "a": {"key": "given", "kept": "file"},
        "b": {"key": "x"},
    }
    assert more == {"a": {"key": " 'given' "}, "b": {"key": "x"}}


def test_no_file_and_no_dictionary_are_nothing() -> None:
    assert load_sections("", None) == {}


def test_entries_without_an_effect_are_told_in_one_warning() -> None:
    sections = {
        "model_file": {"mindir_path": "/", "other": "1"},
        "ascend_context": {"provider": "ge", "precision_mode": "enforce_fp16", "device": "0"},
        "strange": {"entry": "1"},
    }
    used = frozenset({("model_file", "mindir_path"), ("ascend_context", "precision_mode")})
    with pytest.warns(UserWarning, match="without an effect in mcinfer") as caught:
        warn_of_unused(sections, used, stacklevel=1)
    [warning] = caught
    assert str(warning.message).endswith(
        ": [model_file] other, [ascend_context] provider, [ascend_context] device, [strange] entry"
    )
    assert warning.filename == __file__


def test_entries_with_an_effect_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = frozenset({("model_file", "mindir_path")})
        warn_of_unused({"model_file": {"mindir_path": "/"}, "empty": {}}, used, stacklevel=1)


def test_weights_lie_beside_the_path_or_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (tmp_path, tmp_path / "model.onnx"):
        assert weights_folder({"model_file": {"mindir_path": str(path)}}) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert weights_folder({"model_file": {"mindir_path": "model.onnx"}}) == str(tmp_path)


def test_weights_lie_nowhere_where_nobody_says_it() -> None:
    assert weights_folder({}) is None
    assert weights_folder({"model_file": {}}) is None


def test_folder_of_weights_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "no" / "model.onnx")
    with pytest.raises(InvalidInputError, match=r"mindir_path: .* does not exist"):
        weights_folder({"model_file": {"mindir_path": path}})
