"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

job_argument = click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))

set_option = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Lay a value over the job file's, say world.max=4; may be given several times.",
)

DEFAULT_STORAGE = "./runs"

storage_option = click.option(
    "--storage",
    metavar="DIR|URL",
    help=f"Where runs live; goes before a job file's checkpoint.storage. Default: {DEFAULT_STORAGE}.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object to standard output."
)
