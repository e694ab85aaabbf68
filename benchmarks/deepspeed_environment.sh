#!/bin/sh
# DeepSpeed in an environment of its own, build/deepspeed, beside the torch that requirements-dev.txt pins: step.py and
# memory.py run its ranks there. Nothing of it is compiled here but what it compiles itself at its first collective.
#
#     benchmarks/deepspeed_environment.sh
#     PYTHON=python3.12 benchmarks/deepspeed_environment.sh
set -eu
cd "$(dirname "$0")/.."
here=build/deepspeed
"${PYTHON:-.venv/bin/python}" -m venv "$here"
"$here/bin/pip" install -q -r requirements-dev.txt numpy setuptools wheel psutil ninja
# No build isolation: its setup.py imports torch, and pip would fetch another one for it.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$here/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
"$here/bin/pip" install -q -e .
DS_ACCELERATOR=cpu "$here/bin/python" -c "import deepspeed, torch; print('deepspeed', deepspeed.__version__, 'torch', torch.__version__)"
