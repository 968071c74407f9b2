"""The `worldline` command: parses, hands over, turns the outcome into an exit code.

Nothing heavy is imported here or by the modules of the commands: they import torch and Ray when they run, so
that `worldline --help` and a mistyped option answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from worldline.cli.doctor import COMMANDS as DOCTOR
from worldline.cli.inspect import COMMANDS as INSPECT
from worldline.cli.operate import COMMANDS as OPERATE
from worldline.cli.plan import COMMANDS as PLAN
from worldline.cli.run import COMMANDS as RUN
from worldline.exits import BAD_JOB, INTERRUPTED, WRONG_USAGE
from worldline.job.faults import JobError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="worldline", message="%(prog)s %(version)s")
def cli() -> None:
    """Elastic training on Ray: the world may change, the training does not."""


for command in (*RUN, *INSPECT, *OPERATE, *PLAN, *DOCTOR):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A command returns its own as an int, or None for 0."""
    try:
        code = cli.main(args=arguments, prog_name="worldline", standalone_mode=False)
    except click.UsageError as error:
        error.show()
        return WRONG_USAGE
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except JobError as error:
        for fault in error.faults:
            click.echo(f"bad job: {fault}", err=True)
        return BAD_JOB
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
