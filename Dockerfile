# fzero on GPUs. Written, and not tried: no image has been built of it.
#
#   docker build -t fzero .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 fzero \
#       torchrun --standalone --nproc-per-node gpu examples/train_bytes.py
#
# --ipc=host and memlock are for NCCL and pinned memory. requirements-dev.txt has the torch that fzero is tested with. Its
# wheels bring CUDA and NCCL, so that the base needs nothing of either, and the host a driver.
FROM python:3.12-slim
ARG EXTRAS=hf
# inductor, for shard(..., compile=True), calls a C++ compiler
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /fzero
COPY requirements-dev.txt ./
RUN pip install --no-cache-dir -r requirements-dev.txt
COPY pyproject.toml README.md LICENSE ./
COPY fzero fzero
RUN pip install --no-cache-dir ".[${EXTRAS}]"
COPY examples examples
CMD ["python", "-m", "fzero", "doctor"]
