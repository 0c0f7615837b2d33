"""How Numba compiles a function that only compiled code calls: without machine code of its own.

By default Numba makes machine code of every function that a compiled one calls, which nobody runs:
the caller takes in the optimised intermediate code and becomes machine code as a whole. Of the
time that a pass took to compile, that was a third. A `Part` ends with the intermediate code.

Nor does a part that holds many functions have to be optimised: what it calls has been, and its
caller will be as a whole. That was a quarter of what was left. Where no part is optimised, passes
are up to three hundredths slower.
"""

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

FEW = 10  # functions, up to which a part is optimised


class _Intermediate(JITCodeLibrary):
    """A library for linking into others alone: the engine that makes machine code never sees it."""

    def _optimize_final_module(self):
        functions = self._final_module.functions
        if sum(not function.is_declaration for function in functions) <= FEW:
            super()._optimize_final_module()

    def _finalize_final_module(self):
        self._finalized = True

    def get_pointer_to_function(self, name):
        """No function of this library has an address."""
        return 0


class _Lower(Lower):
    """Numba's own, without the search of every tuple for what is counted where nothing is."""

    def _counts(self, kind):
        return self.context.data_model_manager[kind].contains_nrt_meminfo()

    def incref(self, typ, val):
        if self._counts(typ):
            super().incref(typ, val)

    def decref(self, typ, val):
        if self._counts(typ):
            super().decref(typ, val)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    _name = "lowering of a part"
    lowering_class = _Lower

    def run_pass(self, state):
        state.library = _Intermediate(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered, library = state["cr"], state.library
        # What callers know the function by, as after Numba's own pass. It has nothing to run.
        entry = _dynfunc.make_function(
            lowered.fndesc.lookup_module(), state.func_id.func_name, "", 0, lowered.env, (library,)
        )
        state.targetctx.insert_user_function(entry, lowered.fndesc, [library])
        state.reload_init.extend(library._reload_init)
        state["cr"] = lowered._replace(cfunc=entry)
        return True


class Part(CompilerBase):
    """Numba's own passes, with another last one. For `numba.jit`'s ``pipeline_class``.

    The function is for compiled code alone and raises nothing that is made up as it runs.
    """

    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [
            (_Lowering if kind is NativeLowering else kind, why) for kind, why in passes.passes
        ]
        passes.finalize()
        return [passes]
