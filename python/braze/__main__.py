"""``python -m braze``: info, mnist, bench, tune."""

import argparse
import importlib
import json
import sys

import braze


def main(argv=None):
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="braze", description=braze.__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="what is built, loaded and missing; for bug reports")
    info.add_argument("--json", action="store_true", help="print JSON")
    mnist = commands.add_parser("mnist", help="train a CNN on MNIST; time it against stock PyTorch")
    bench = commands.add_parser("bench", help="time the ops against stock PyTorch")
    tune = commands.add_parser("tune", help="measure which kernels are the fastest here")
    unavailable, modules = {}, {}
    for name, module, command in [
        ("mnist", "braze.mnist", mnist),
        ("bench", "braze.bench", bench),
        ("tune", "braze._tune_cli", tune),
    ]:
        try:
            braze._lib.require()
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(command)
        except ImportError as error:  # `info` has to work nevertheless
            unavailable[name] = error
    args, unknown = parser.parse_known_args(argv)
    if args.command in unavailable:
        print(f"braze {args.command}: {unavailable[args.command]}", file=sys.stderr)
        return 2
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if args.command == "info":
            page = braze.info()
            print(json.dumps(page, indent=2) if args.json else page)
        elif args.command == "bench":
            return modules["bench"].main(args)
        else:
            modules[args.command].run(args)
    except KeyboardInterrupt:
        print(f"\nbraze {args.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"braze {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
