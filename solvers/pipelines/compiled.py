"""How numba compiles kernels here: what only other kernels call is compiled once, within these.

Numba optimises every function on its own, then again within each function that calls it, and passes
every field of a named tuple as an argument of its own. Half of the first plan's time went there;
docs/decisions/0041-first-plan.md has the figures.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

from numba import njit, types
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model
from numpy.typing import NDArray

from stagewright.formulations.prices.collectives import all_reduce_pace, paced_seconds
from stagewright.graphs.documents.arrays import Floats

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
T = TypeVar("T")

# Numba's own types know no options of compilation targets.
_WITHOUT_COUNTS: dict[str, Any] = {"_nrt": False}


class _Reference(types.Type):
    """A named tuple ``of`` a numba type, by its address."""

    def __init__(self, of: Any) -> None:
        self.of = of
        super().__init__(name=f"Reference({of.instance_class.__name__})")

    @property
    def key(self) -> Any:
        return self.of


register_model(_Reference)(models.OpaqueModel)


@infer_getattr
class _Fields(AttributeTemplate):
    """The types of the fields; of a field that is a named tuple, a reference."""

    key = _Reference

    def generic_resolve(self, reference: _Reference, name: str) -> Any:  # type: ignore[override]
        field = reference.of.types[reference.of.fields.index(name)]
        return _Reference(field) if hasattr(field, "instance_class") else field


@lower_getattr_generic(_Reference)
def _field(context: Any, builder: Any, reference: _Reference, value: Any, name: str) -> Any:
    """Load a field, or point to it if it is a named tuple."""
    place = reference.of.fields.index(name)
    field = reference.of.types[place]
    whole = builder.bitcast(value, context.get_value_type(reference.of).as_pointer())
    pointer = cgutils.gep_inbounds(builder, whole, 0, place)
    if hasattr(field, "instance_class"):
        return builder.bitcast(pointer, cgutils.voidptr_t)
    return impl_ret_borrowed(context, builder, field, builder.load(pointer))


@intrinsic
def _refer(_: Any, whole: Any) -> Any:
    def put(__: Any, builder: Any, ___: Any, arguments: Sequence[Any]) -> Any:
        pointer = cgutils.alloca_once_value(builder, arguments[0])
        return builder.bitcast(pointer, cgutils.voidptr_t)

    return _Reference(whole)(whole), put


refer: Callable[[T], T] = _refer  # type: ignore[assignment]
"""In a kernel: the same named tuple by its address, whose fields are read but not set.

Only for a kernel's own arguments, whose arrays live as long as it runs. A call by address compiles
in a fraction of the time, as numba passes each shape and stride of each array otherwise.
"""


class _Library(JITCodeLibrary):
    """Code that is optimised once, after all parts are linked in, each of them once."""

    def add_linking_library(self, library: Any) -> None:
        if library in self._linking_libraries:
            return
        super().add_linking_library(library)  # type: ignore[no-untyped-call]
        for part in getattr(library, "parts", ()):  # after it, as LLVM links only what is called
            self.add_linking_library(part)

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager()
        passes.run(self._final_module, builder)


class _PartLibrary(_Library):
    """Code that is only linked into other code, and there optimised and translated."""

    @property
    def codegen(self) -> Any:
        return SimpleNamespace(set_env=lambda *_: None)  # no function here is called from Python

    @property
    def parts(self) -> list[Any]:
        return self._linking_libraries

    def get_pointer_to_function(self, _: str) -> int:
        return 0

    def finalize(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True


class _EntryCompiler(Compiler):
    library: type[_Library] = _Library

    def define_pipelines(self) -> Any:
        name = self.state.func_id.func_qualname
        self.state.library = self.library(self.state.targetctx.codegen(), name)
        self.state.library.enable_object_caching()
        return super().define_pipelines()  # type: ignore[no-untyped-call]


class _PartCompiler(_EntryCompiler):
    library = _PartLibrary


_ENTRY: dict[str, Any] = {
    "cache": True, "error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True,
    "pipeline_class": _EntryCompiler,
}  # fmt: skip
_PART: dict[str, Any] = {
    "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
    "pipeline_class": _PartCompiler,
}  # fmt: skip


def entry(kernel: Kernel) -> Kernel:
    """Compile a kernel that Python calls, and keep it on disk."""
    made: Kernel = njit(**_ENTRY)(kernel)
    return made


def lean_entry(kernel: Kernel) -> Kernel:
    """Compile as :func:`entry` does, without counts of references: see :func:`lean`."""
    made: Kernel = njit(**_ENTRY, **_WITHOUT_COUNTS)(kernel)
    return made


def inner(kernel: Kernel) -> Kernel:
    """Compile a kernel that only other kernels call."""
    return _part(kernel, {})


def lean(kernel: Kernel) -> Kernel:
    """Compile as :func:`inner` does, without counts of references to arrays.

    With arguments of many arrays they take a third of the time of compilation, and more than half
    of that of short kernels. Such a kernel must not allocate, so neither copy nor combine arrays as
    a whole, nor return one: the caller would release it.
    """
    return _part(kernel, _WITHOUT_COUNTS)


def _part(kernel: Kernel, options: dict[str, Any]) -> Kernel:
    """Compile once for all values of an argument; numba does it anew for True, 0 and 1."""
    made: Any = njit(**_PART, **options)(kernel)
    resolve = made.get_call_template
    made.get_call_template = lambda given, named: resolve(
        tuple(map(types.unliteral, given)),
        {name: types.unliteral(one) for name, one in named.items()},
    )
    part: Kernel = made
    return part


@lean
def least_index(values: Floats) -> int:
    """The first index of the least value; faster than numpy's argmin on short arrays."""
    least = 0
    for other in range(1, len(values)):
        if values[other] < values[least]:
            least = other
    return least


@lean
def copy(values: NDArray[Any], start: int, stop: int, to: NDArray[Any]) -> None:
    """Copy ``values[start:stop]`` to the same places; numpy's copies may allocate."""
    for k in range(start, stop):
        to[k] = values[k]


ring_pace = lean(all_reduce_pace)
paced = lean(paced_seconds)
