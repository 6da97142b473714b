"""`vllm serve --headless`, of a vLLM that was built from its sources and carries no metadata: python -m tests.engine.headless MODEL …"""

from vllm.entrypoints.cli.serve import run_headless
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # an older one
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    args.model = args.model_tag or args.model
    args.api_server_count = args.api_server_count or 1
    run_headless(args)
