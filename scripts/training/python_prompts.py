#!/usr/bin/env python3
"""Prompts for `spec-build collect` that need no download: signatures and docstrings of this Python's own library, as in HumanEval.

    scripts/training/python_prompts.py FILE [NUM]
"""

import ast
import json
import pathlib
import random
import sys
import sysconfig

# Characters of a docstring: shorter ones say too little, longer ones are most of the text.
SHORTEST, LONGEST = 80, 700


def prompts():
    """By name of the function, the first one of each name."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "dist-packages"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            # What tests of the parser are made of.
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node) or ""
            if SHORTEST <= len(text) <= LONGEST:
                arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
                lines = f'"""{text}\n"""'.splitlines()
                body = "\n".join("    " + line if line else "" for line in lines)
                found.setdefault(node.name, f"def {node.name}({arguments}):\n{body}\n")
    return found


def main():
    """Writes as many as wanted, mixed, the same each time."""
    output, *num = sys.argv[1:]
    found = prompts()
    names = sorted(found)
    random.Random(7).shuffle(names)
    with open(output, "w") as file:
        for name in names[:int(num[0]) if num else len(names)]:
            file.write(json.dumps({"prompt": found[name]}) + "\n")


if __name__ == "__main__":
    main()
