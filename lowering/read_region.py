"""Read: what XLA compiled for a region → its steps, with workspaces, collectives and kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

from tracegraph.lowering.collector import hold_collector
from tracegraph.lowering.compiler import Compiler
from tracegraph.lowering.cut_collectives import cut_collectives
from tracegraph.lowering.limit_workspaces import limit_workspaces
from tracegraph.lowering.own_kernels import compile_own_kernels
from tracegraph.lowering.request import Region
from tracegraph.lowering.xla.decode import read_origins, read_program
from tracegraph.lowering.xla.program import XlaProgram
from tracegraph.runtime.environment import read_cublas_workspace_bytes


@hold_collector
def read_region(executable: Any, region: Region, compiler: Compiler) -> XlaProgram:
    """Returns XLA's steps for a region, as the target of a compiler runs them.

    Args:
        executable: of the region, as JAX compiled it.
        region: for its name.
        compiler: that compiled it.

    Raises:
        UnsupportedError: the program holds what this version cannot lower.
    """
    program = read_program(
        executable.runtime_executable().serialize(),
        name=region.name,
        check_call=compiler.target.find_call_problem,
        plan_call=compiler.target.plan_library_call,
        reads_loops=compiler.tuning.merges,
        partitions=len(compiler.owners),
        has_choices=compiler.target.target.has_choices,
    )
    program = limit_workspaces(
        program, compiler.target.find_workspace_bytes, read_cublas_workspace_bytes()
    )
    program = cut_collectives(
        program, compiler.owners, region.name, lambda name: read_origins(executable).locate(name)
    )
    compile_kernel = compiler.target.compile_kernel
    if compile_kernel is None:
        return program
    steps = compile_own_kernels(program.steps, compile_kernel)
    return dataclasses.replace(program, steps=steps)
