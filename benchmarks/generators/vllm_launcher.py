"""Runs in vLLM's environment: `vllm bench serve` out of the source package, without the compiled parts of vLLM.

python vllm_launcher.py SOURCE [options of `vllm bench serve`]
"""

import argparse
import sys


def launch() -> None:
    sys.path.insert(0, sys.argv[1])
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
    except ImportError:
        Parser = argparse.ArgumentParser
    parser = Parser(prog="vllm bench serve")
    add_cli_args(parser)
    serve(parser.parse_args(sys.argv[2:]))


if __name__ == "__main__":
    launch()
