"""What a program set in ``SessionOptions`` and ``RunOptions``, and how it reaches the workers.

ONNX Runtime's options can be set, and for the most part not be read: not the names of the configuration
entries, not the sizes of free dimensions, not the libraries of operators. So importing mcinfer.ort replaces
the methods of these two classes that set something by methods that do the same, and note the call beside the
object. The notes go with the object. What an object holds that was made before, or in native code, stays
unknown, whatever is called later. The level of the default logger, which a process has once, is noted too.
"""

import copyreg
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import ref

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as native
from onnxruntime.capi.onnxruntime_inference_collection import OrtValue

from mcinfer.errors import InvalidInputError
from mcinfer.model_cache import FOLDER_KEY
from mcinfer.ort.errors import Unsupported

if TYPE_CHECKING:  # inline sessions of small models do not need it
    from mcinfer.config import EngineOptions

Call = tuple[str, tuple[Any, ...]]
"""A method's name, and what it was called with."""

State = tuple[list[tuple[str, Any]], list[Call]]
"""The attributes that differ from the default, and the calls: what `rebuilt` takes."""

_Noted = TypeVar("_Noted")


class ByIdentity(Generic[_Noted]):
    """What is noted of objects while they live. A program's subclass may have an equality of its own."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[ref[Any], _Noted]] = {}

    def get(self, one: Any) -> _Noted | None:
        found = self._found.get(id(one))
        return None if found is None else found[1]

    def setdefault(self, one: Any, default: _Noted) -> _Noted:
        """What is noted of an object: the default from now on, if there is nothing yet."""
        # No code of Python's runs when it goes: a signal's handler could raise there, and be lost.
        gone = ref(one, partial(self._found.pop, id(one)))
        return self._found.setdefault(id(one), (gone, default))[1]

    def discard(self, one: Any) -> None:
        self._found.pop(id(one), None)

    def objects(self) -> list[Any]:
        alive = (found() for found, _ in self._found.copy().values())
        return [one for one in alive if one is not None]


_NOTES: ByIdentity[dict[Any, Call]] = ByIdentity()
"""The calls of each object of options. One that takes the place of an earlier one has its key."""

_DEFAULT_LOGGER: dict[str, str] = {}
"""What was set for the process."""

_READS = ("get_", "has_", "_")


def note_calls(kind: Any) -> None:
    """Have the methods of a class of options that set something note their calls."""
    begin = kind.__init__

    @wraps(begin)
    def initialise(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        _NOTES.discard(self)
        _NOTES.setdefault(self, {})

    kind.__init__ = initialise
    for name in dir(kind):
        if callable(getattr(kind, name)) and not name.startswith(_READS):
            setattr(kind, name, _noting(name, getattr(kind, name)))


def _noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def noting(self: Any, *arguments: Any, **named: Any) -> Any:
        result = method(self, *arguments, **named)
        arguments += (*named.values(),)
        notes = _NOTES.get(self)
        if notes is None:
            return result
        call = (name, as_now(arguments))
        if name == "register_custom_ops_library":  # the runtime has loaded it from there
            notes[object()] = (name, (_under(working_folder(), os.fspath(arguments[0])),))
        elif name.endswith("_config_entry"):
            notes[name, arguments[0]] = call
        elif name.startswith("add_free_dimension_override"):
            notes.setdefault((name, arguments[0]), call)
        else:
            notes[object()] = call
        return result

    return noting


NOT_NOTED = "not made by this program after mcinfer.ort was imported"


def is_noted(options: Any) -> bool:
    """Whether all calls of an object of options are known: it was made after mcinfer.ort was imported."""
    return _NOTES.get(options) is not None


def as_now(value: Any) -> Any:
    """A program's argument as it is now: lists, sets and dictionaries may change later."""
    if type(value) in (list, set, tuple):
        return type(value)(as_now(item) for item in value)
    if type(value) is dict:
        return {key: as_now(item) for key, item in value.items()}
    return value


def note_default_logger() -> None:
    """Have ONNX Runtime's functions that set the level of its default logger note it."""
    for name in ("default_logger_severity", "default_logger_verbosity"):
        noting = _noting_level(name, getattr(native, f"set_{name}"))
        for module in (native, onnxruntime):
            setattr(module, f"set_{name}", noting)


def _noting_level(name: str, setter: Callable[[int], None]) -> Callable[[int], None]:
    @wraps(setter)
    def noting(level: int) -> None:
        setter(level)
        _DEFAULT_LOGGER[name] = str(int(level))

    return noting


def working_folder() -> str:
    """Empty if it is gone: then paths have to be absolute."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _under(folder: str, library: str) -> str:
    """The path of a library; one without a folder is the dynamic linker's to find."""
    return os.path.join(folder, library) if os.sep in library else library


def calls(options: Any) -> list[Call]:
    """The noted calls of an object of options, in their order; none of None."""
    return [*(_NOTES.get(options) or {}).values()]


def attributes(options: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of ``SessionOptions`` that differ from the default, by name."""
    default = native.SessionOptions()  # a subclass may set some when it is made
    for name in dir(default):
        usual = getattr(default, name)
        if not name.startswith("_") and not callable(usual) and getattr(options, name) != usual:
            yield name, getattr(options, name)


def rebuilt(set_attributes: Sequence[tuple[str, Any]], noted: Sequence[Call]) -> Any:
    """New ``SessionOptions`` with these attributes and calls."""
    options = native.SessionOptions()
    for name, value in set_attributes:
        setattr(options, name, value)
    for name, arguments in noted:
        getattr(options, name)(*arguments)
    return options


def state(options: Any) -> State | None:
    """``SessionOptions`` as they are now, for `rebuilt`; None if not all of what they hold is known."""
    return ([*attributes(options)], calls(options)) if is_noted(options) else None


def copied(options: Any, *, without: str = "") -> Any:
    """New ``SessionOptions`` like these, or the default ones; `without` a configuration entry of that key."""
    if options is None:
        return native.SessionOptions()
    left_out = ("add_session_config_entry", without)
    kept = [(name, given) for name, given in calls(options) if (name, *given[:1]) != left_out]
    return rebuilt([*attributes(options)], kept)


def _reduced(options: Any) -> tuple[Any, ...]:
    """``SessionOptions`` for `pickle`; `Unsupported`: not all of what they hold is known."""
    found = state(options)
    if found is None:
        raise Unsupported(
            f"SessionOptions: got such that were {NOT_NOTED}, which cannot be pickled"
        )
    return rebuilt, found


def _reduced_value(value: Any) -> tuple[Any, ...]:
    return OrtValue.ortvalue_from_numpy, (_elements(value),)


native.SessionOptions.__reduce__ = _reduced
copyreg.pickle(OrtValue, _reduced_value)
copyreg.pickle(native.OrtValue, _reduced_value)


def _elements(value: Any) -> NDArray[Any]:
    """A copy of the elements of an ``OrtValue``."""
    return np.array(value.numpy())


def named_providers(options: Any) -> list[tuple[str, dict[str, str]]]:
    """The providers that were added to ``SessionOptions``, by name."""
    given = (arguments for name, arguments in calls(options) if name == "add_provider")
    return [(name, dict(*more)) for name, *more in given]


def config_entries(options: Any) -> dict[str, str]:
    """The configuration entries that were added to ``SessionOptions``, if there are any."""
    return dict(given for name, given in calls(options) if name == "add_session_config_entry")


_AS_TEXT = (
    *("graph_optimization_level", "execution_order", "enable_cpu_mem_arena", "enable_mem_pattern"),
    *("enable_mem_reuse", "use_deterministic_compute"),
    *("log_severity_level", "log_verbosity_level", "logid"),
)
"""Attributes that workers set as they are."""

_READ_ELSEWHERE = (
    *("intra_op_num_threads", "inter_op_num_threads", "execution_mode"),
    "optimized_model_filepath",
    "profile_file_prefix",  # without profiling it does nothing in a plain session either
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """How ``SessionOptions`` reach the workers.

    Attributes:
        engine: The options of their engine.
        weights: Values for the model's initialisers, by name, for `Master.update_weights`.
        files: The model's external data, by the name of the file.
        optimised: Where to write the optimised model; empty to write none.
    """

    engine: "EngineOptions"
    weights: dict[str, NDArray[Any]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    optimised: str = ""


def passed(options: Any, base: "EngineOptions", folder: str, cores: int) -> Passed:
    """What the workers get of a program's options.

    Args:
        options: The program's ``SessionOptions``.
        base: Options of mcinfer, which those of the program override.
        folder: The folder of relative paths.
        cores: The cores of one worker: so many operators run at once in the parallel mode, unless the
            program says a number.

    Raises:
        Unsupported: An option was set that cannot act in other processes; names it. Or not all of what the
            options hold is known.
    """
    if not is_noted(options):
        raise Unsupported(
            f"SessionOptions: got such that were {NOT_NOTED}, so what they hold is not known; expected new "
            "ones that are set after the import"
        )
    differing = dict(attributes(options))
    found: dict[str, Any] = {}
    if options.intra_op_num_threads > 0:
        found["threads"] = options.intra_op_num_threads
    if options.execution_mode == native.ExecutionMode.ORT_PARALLEL:
        found["inter_op_threads"] = max(1, options.inter_op_num_threads or cores)
    given = {name: _text(differing[name]) for name in _AS_TEXT if name in differing}
    found["session_options"] = {**_DEFAULT_LOGGER, **base.session_options, **given}
    for name, value in differing.items():
        if name not in (*_AS_TEXT, *_READ_ELSEWHERE):
            raise Unsupported(
                f"SessionOptions.{name}: got {value!r}, {_REFUSED.get(name, _NO_ACT)}"
            )
    config = {**base.session_config, **config_entries(options)}
    libraries = [_under(folder, library) for library in base.custom_operators]
    by_name, by_denotation = dict(base.free_dimensions), dict(base.free_denotations)
    weights: dict[str, NDArray[Any]] = {}
    files: dict[str, bytes] = {}
    for name, arguments in calls(options):
        match name:
            case "register_custom_ops_library":
                libraries.append(arguments[0])
            case "add_free_dimension_override_by_name":
                by_name[arguments[0]] = int(arguments[1])
            case "add_free_dimension_override_by_denotation":
                by_denotation[arguments[0]] = int(arguments[1])
            case "add_initializer":
                weights[arguments[0]] = _elements(arguments[1])
            case "add_external_initializers":
                weights |= zip(arguments[0], map(_elements, arguments[1]), strict=True)
            case "add_external_initializers_from_files_in_memory":
                contents = (bytes(data[:size]) for data, size in zip(*arguments[1:], strict=True))
                files |= zip(map(os.fspath, arguments[0]), contents, strict=True)
            case "add_session_config_entry" | "add_provider":
                pass  # `config_entries`, `named_providers`
            case _:
                raise Unsupported(f"SessionOptions.{name}(): {_REFUSED.get(name, _NO_ACT)}")
    if config.get(FOLDER_KEY):
        config[FOLDER_KEY] = os.path.join(folder, config[FOLDER_KEY])
    try:
        engine = replace(
            base,
            **found,
            session_config=config,
            custom_operators=[*dict.fromkeys(libraries)],
            free_dimensions=by_name,
            free_denotations=by_denotation,
            variable_weights=[*dict.fromkeys([*base.variable_weights, *weights])],
            describe=True,
        )
    except InvalidInputError as exc:
        raise InvalidInputError(f"sess_options: {exc}") from exc
    target = str(options.optimized_model_filepath)
    target = os.path.join(folder, target) if target else ""
    return Passed(engine=engine, weights=weights, files=files, optimised=target)


def _text(value: Any) -> str:
    """An attribute as `EngineOptions.session_options` has it."""
    if isinstance(value, bool):
        return str(int(value))
    return str(getattr(value, "name", value))


_NO_ACT = "which mcinfer.ort does not pass on to its workers"
_REFUSED = {
    "enable_profiling": "but each worker would write a profile of its own: profile a plain session",
    "use_per_session_threads": "but the threads of this process cannot run the workers' sessions",
}
"""What to do in place of an option that cannot act in other processes, by its name."""

_IGNORED_ENTRIES = {"memory.enable_memory_arena_shrinkage", "gpu_graph_id"}
"""Entries of ``RunOptions`` that change no result: when a worker frees memory is not a run's business, and
the number of a graph is only for plain sessions, as workers number theirs."""


def check_run_options(options: Any) -> None:
    """Raise `Unsupported`, with its name, for what a run in another process cannot follow, or is not known.

    The log levels and the tag of a run do nothing, since workers log no runs; and without
    ``only_execute_path_to_fetches`` the outputs are the same.
    """
    if not is_noted(options):
        raise Unsupported(
            f"RunOptions: got such that were {NOT_NOTED}, so what they hold is not known; expected new ones"
        )
    for name, arguments in calls(options):
        if name == "add_run_config_entry" and arguments[0] in _IGNORED_ENTRIES:
            continue
        what = f"{name}({arguments[0]!r}, …)" if arguments else f"{name}()"
        raise Unsupported(f"RunOptions.{what}: {_NO_ACT}")
