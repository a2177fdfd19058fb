"""Planning on paper: the best rows that a placement allows, certified or searched for.

`optimize` needs OR-Tools (pip install 'minipipe[optimize]'); everything else is pure Python.
"""
