"""Plan -> programs: what each hook of a session has to do, and in which order. Pure."""

from gradsurgeon.compiler.fusing import Piece
from gradsurgeon.compiler.listing import listing
from gradsurgeon.compiler.program import Group, ModuleProgram, Program, Stage, compile_plan

__all__ = ["Group", "ModuleProgram", "Piece", "Program", "Stage", "compile_plan", "listing"]
