"""``mcinfer doctor``: whether this machine has what mcinfer needs."""

import sys

import typer


def doctor() -> None:
    """Check whether this machine has what mcinfer needs, and say what to do where it has not."""
    # Imported here: it starts pools, so it takes most of mcinfer.
    from mcinfer.diagnosis.looking import examine

    states = []
    for finding in examine():
        states.append(finding.state)
        advice = f" -> {finding.advice}" if finding.advice else ""
        text = " ".join(f"{finding.name}: {finding.found}{advice}".split())
        print(f"{finding.state:8} {text}", flush=True)
    problems = states.count("problem")
    if problems:
        noun = "problem was" if problems == 1 else "problems were"
        print(f"mcinfer: {problems} {noun} found", file=sys.stderr)
        raise typer.Exit(1)
