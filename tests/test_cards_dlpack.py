"""Tests of mcinfer/cards/dlpack.py: what other libraries get, what is taken, how long memory lives."""

import ctypes
import gc
import threading
import weakref
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from mcinfer.cards.dlpack import DlpackTensor, read
from mcinfer.config import Device
from mcinfer.errors import InvalidInputError
from mcinfer.specs import ELEMENT_TYPES, STRING

NUMBERS = [name for name in ELEMENT_TYPES if name != STRING]


class Owner:
    """Memory that can be watched."""

    def __init__(self, size: int = 64) -> None:
        self.memory = (ctypes.c_uint8 * size)(*range(size))


def tensor(
    owner: Owner, element_type: str = "int32", shape: tuple[int, ...] = (2, 3), **options: Any
) -> DlpackTensor:
    fields = {"device": None, **options}
    address = ctypes.addressof(owner.memory)
    return DlpackTensor(
        address=address, shape=shape, element_type=element_type, owner=owner, **fields
    )


class Old:
    """A producer from before DLPack 1.0."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return self.array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device


@pytest.mark.parametrize("form", [lambda value: value, Old])
@pytest.mark.parametrize("element_type", NUMBERS)
def test_every_element_type_comes_back_as_it_went(element_type: str, form: Any) -> None:
    owner = Owner()
    sent = tensor(owner, element_type)
    got = read(form(sent))
    assert (got.address, got.shape, got.element_type) == (sent.address, (2, 3), element_type)
    assert (got.device, got.size, got.read_only) == (None, sent.size, False)


@pytest.mark.parametrize("element_type", [n for n in NUMBERS if not n.startswith("complex")])
def test_onnx_runtime_takes_the_memory_in_place(element_type: str) -> None:
    owner = Owner()
    value = ort.OrtValue.from_dlpack(tensor(owner, element_type))
    assert value.data_ptr() == ctypes.addressof(owner.memory)
    assert (value.element_type(), tuple(value.shape())) == (
        ELEMENT_TYPES[element_type].onnx,
        (2, 3),
    )


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (2, 1, 3)])
def test_numpy_and_this_share_memory_both_ways(shape: tuple[int, ...]) -> None:
    whole = np.arange(2 * np.prod(shape, dtype=int), dtype=np.float32)
    array = whole[whole.size // 2 :].reshape(shape)  # which does not begin where its memory does
    there = read(array)
    assert there.address == array.ctypes.data or array.size == 0
    back = np.from_dlpack(there)
    assert back.shape == shape
    assert array.size == 0 or np.shares_memory(back, array)


def test_read_only_memory_is_said_to_be() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    assert read(array).read_only
    lent = tensor(Owner(), read_only=True)
    assert not np.from_dlpack(lent).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        lent.__dlpack__()


def test_owner_lives_as_long_as_any_consumer_in_any_thread() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    consumers: list[Any] = [
        np.from_dlpack(tensor(owner)),
        ort.OrtValue.from_dlpack(tensor(owner)),
        read(tensor(owner)),
        tensor(owner).__dlpack__(),  # never taken
        tensor(owner).__dlpack__(max_version=(1, 0)),
    ]
    del owner
    while consumers:
        gc.collect()
        assert alive() is not None
        thread = threading.Thread(target=consumers.pop)
        thread.start()
        thread.join()
    assert alive() is None


def test_producer_keeps_its_memory_until_the_tensor_and_what_it_lent_are_gone() -> None:
    class Watched(np.ndarray[Any, Any]):
        pass

    array = np.arange(4).view(Watched)
    alive = weakref.ref(array)
    there = read(array)
    view = np.from_dlpack(there)
    del array, there
    assert alive() is not None
    assert view.tolist() == [0, 1, 2, 3]
    del view
    assert alive() is None


def test_tensor_of_a_card_is_ordered_before_the_consumers_stream() -> None:
    streams: list[int | None] = []
    lent = tensor(Owner(), device=Device("cuda", 3), ready=streams.append)
    got = read(lent, stream=77)
    assert got.device == Device("cuda", 3)
    assert lent.__dlpack_device__() == (2, 3)
    read(lent)
    read(Old(lent), stream=0)
    assert streams == [77, 1, 1]  # 1 is the legacy default stream


def test_tensor_is_lent_only_where_it_lies() -> None:
    lent = tensor(Owner(), device=Device("cuda", 0))
    for options in ({"copy": True}, {"dl_device": (1, 0)}, {"dl_device": (2, 1)}):
        with pytest.raises(BufferError, match=r"only lent, where it lies, on cuda:0"):
            lent.__dlpack__(**options)
    lent.__dlpack__(copy=False, dl_device=(2, 0))


class Capsule:
    """A producer of a capsule that was made before."""

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_capsule_is_taken_once() -> None:
    producer = Capsule(tensor(Owner()).__dlpack__())
    kept = read(producer)
    with pytest.raises(InvalidInputError, match="not used yet"):
        read(producer)
    assert kept.shape == (2, 3)


class Elsewhere(Capsule):
    def __dlpack_device__(self) -> tuple[int, int]:
        return (10, 0)  # ROCm


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            np.zeros((3, 4), np.float32)[:, ::2],
            r"\[3, 2\] with strides \[4, 2\], expected C-contig",
        ),
        (np.zeros((3, 4), np.float32).T, "copy it first, as ascontiguousarray does"),
        ([1.0], "got list, expected an object with __dlpack__"),
        (Capsule("no capsule"), "got 'no capsule' from __dlpack__"),
        (Elsewhere(None), "DLPack's device 10, expected the host"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_words(value: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        read(value)


def test_unknown_element_type_and_version_are_refused_and_let_go() -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    capsules = [tensor(owner).__dlpack__(max_version=(1, 1)) for _ in range(2)]
    pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
    pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    places = [pointer(capsule, b"dltensor_versioned") for capsule in capsules]
    del owner
    ctypes.c_uint32.from_address(places[0]).value = 2  # `DLPackVersion.major`
    ctypes.c_uint8.from_address(places[1] + 52).value = 99  # `DLDataType.code`
    texts = [r"DLPack 2\.\d, expected 1", "type 99 with 32 bits and 1 lanes"]
    for text in texts:
        with pytest.raises(InvalidInputError, match=text):
            read(Capsule(capsules.pop(0)))
    gc.collect()
    assert alive() is None
