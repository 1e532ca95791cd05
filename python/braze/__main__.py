"""``python -m braze``: info, mnist, bench."""

import argparse
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
    bench_parser = commands.add_parser("bench", help="time the ops against stock PyTorch")
    if braze._lib.load_error is None:
        from braze import bench
        from braze.mnist import add_arguments

        add_arguments(mnist)
        bench.add_arguments(bench_parser)
    args = parser.parse_args(argv)
    try:
        if args.command == "info":
            page = braze.info()
            print(json.dumps(page, indent=2) if args.json else page)
        elif args.command == "mnist":
            from braze.mnist import run

            run(args)
        else:
            return bench.main(args)
    except KeyboardInterrupt:
        print(f"\nbraze {args.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"braze {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
