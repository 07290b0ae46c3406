"""The startup module of Python processes that a program under ``flashlin run`` starts.

``flashlin run`` puts the folder of this file on PYTHONPATH, so each such process imports this module when it
starts. The module patches the packages that ``flashlin run`` patches.
"""
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(os.path.abspath(__file__))
_hidden = PathFinder.find_spec("sitecustomize",
                               [folder for folder in sys.path if os.path.abspath(folder or ".") != _here])
if _hidden is not None and _hidden.loader is not None:  # also run the sitecustomize that this one hides
    _hidden.loader.exec_module(module_from_spec(_hidden))

if os.environ.get("FLASHLIN_PATCH") or os.environ.get("FLASHLIN_SUMMARY"):
    try:
        from flashlin.integrations import run_command
        run_command.inherit()
    except (Exception, SystemExit) as error:  # another Python without flashlin, or a broken package
        print(f"flashlin: nothing is patched in this process ({type(error).__name__}: {error})",
              file=sys.stderr)
