"""Run the code cells of a notebook by IPython, and print what each printed as a JSON list.

python tests/real/notebook_cells.py NOTEBOOK
"""

import json
import pathlib
import sys

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output


def run(cells):
    """Yield the printed text of each cell, with its last value as a notebook shows it."""
    shell = InteractiveShell.instance()
    shell.system = shell.system_piped  # a terminal's shell writes to the process's stdout, past the capture
    for cell in cells:
        with capture_output() as captured:
            result = shell.run_cell("".join(cell["source"]))
        if not result.success:
            sys.exit(f"{captured.stdout}{captured.stderr}")
        yield captured.stdout


if __name__ == "__main__":
    notebook = json.loads(pathlib.Path(sys.argv[1]).read_text())
    print(json.dumps(list(run([cell for cell in notebook["cells"] if cell["cell_type"] == "code"]))))
