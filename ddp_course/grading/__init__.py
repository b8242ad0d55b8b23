"""Exercises on real ranks: `check` for the student in the notebook, `grade` for a class.

exercise    the shape of an exercise: what runs on ranks, how it is judged
table       all exercises
exercises/  one module for each: its cases, with a message for each misconception
compare     how numbers differ, in the student's terms
check       run the cases on the ranks of this notebook
progress    what has been solved
grade       a class, unattended: submissions are read as text and run in a process of their own
"""

from .check import check

__all__ = ["check"]
