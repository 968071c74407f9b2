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

storage_option = click.option(
    "--storage",
    metavar="DIR|URL",
    help="Where runs live; goes before the job file's checkpoint.storage. Default: ./runs.",
)
