"""``python -m braze``: info, mnist, bench, tune."""

import argparse
import json
import sys

import braze


def main(argv=None):
    parser = argparse.ArgumentParser(prog="braze", description=braze.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what is built, loaded and missing; for bug reports")
    info.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.command == "info":
        page = braze.info()
        print(json.dumps(page, indent=2) if args.json else page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
