"""Plan -> program: what each hook of a session has to do, and in which order. Pure."""

from gradsurgeon.compiler.program import ModuleProgram, Program, Stage, compile_plan

__all__ = ["ModuleProgram", "Program", "Stage", "compile_plan"]
