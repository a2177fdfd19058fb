"""The run half: real processes, links between them, stages, and the interpreter of rows."""
