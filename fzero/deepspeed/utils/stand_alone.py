"""Weights of a checkpoint of fzero, whole and in float32. This script needs torch alone, and nothing of fzero.

`engine.save_checkpoint` puts it beside the checkpoints as zero_to_fp32.py:

    python zero_to_fp32.py CHECKPOINTS OUTPUT [--tag TAG]

CHECKPOINTS is the folder that was given to save_checkpoint. OUTPUT is a file whose name ends in .bin or .pt, or a
folder, which gets pytorch_model.bin: a state dict of torch with the names of the module.
"""

import argparse
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtypes by their names in a safetensors file."""
PREFIXES = ("params.", "buffers.")
"""What leaves of the module begin with, of all that a checkpoint has."""


def find_folder(checkpoint_dir: str, tag: str | None = None) -> Path:
    """The folder with the manifest of the checkpoint `tag`, by default of the last one that was saved."""
    folder = Path(checkpoint_dir)
    if tag is None:
        latest = folder / "latest"
        if not latest.is_file():
            raise SystemExit(f"{folder} has no file 'latest': give --tag, or the folder of save_checkpoint")
        tag = latest.read_text().strip()
    steps = [path for path in (folder / tag).glob("step-*") if path.name[5:].isdecimal()]
    if not steps:
        raise SystemExit(f"{folder / tag} has no checkpoint of fzero: give the folder of save_checkpoint")
    return max(steps, key=lambda path: int(path.name[5:]))


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says about its leaves and files."""
    text = (folder / "manifest.json").read_text()
    head = json.loads(text)
    _, _, body = text.partition(', "body": ')
    if head.get("format") != "fzero.checkpoint" or f"{zlib.crc32(body[:-1].encode()):08x}" != head["crc32"]:
        raise SystemExit(f"{folder / 'manifest.json'} is damaged, or not fzero's")
    body_of_file: dict[str, Any] = head["body"]
    return body_of_file


def read_parts(file: Path, nbytes: int, crc32: str) -> dict[str, torch.Tensor]:
    """The flat parts of the module's leaves in one file."""
    content = bytearray(file.read_bytes())
    if len(content) != nbytes or f"{zlib.crc32(content):08x}" != crc32:
        raise SystemExit(f"{file} is damaged: its size or its sum is not that of the manifest")
    (length,) = struct.unpack("<Q", content[:8])
    header, begin = json.loads(content[8 : 8 + length]), 8 + length
    parts = {}
    for path, entry in header.items():
        if path.startswith(PREFIXES):
            start, stop = entry["data_offsets"]
            values = torch.frombuffer(bytearray(content[begin + start : begin + stop]), dtype=torch.uint8)
            parts[path] = values.view(DTYPES[entry["dtype"]])
    return parts


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir: str, tag: str | None = None) -> dict[str, torch.Tensor]:
    """The weights and running statistics of a checkpoint by their names in the module. Floating ones are float32."""
    folder = find_folder(checkpoint_dir, tag)
    manifest = read_manifest(folder)
    parts: dict[str, list[torch.Tensor]] = {}
    for number, (nbytes, crc32, _) in enumerate(manifest["files"]):  # the parts of a leaf follow in the order of files
        for path, part in read_parts(folder / f"rank-{number:05d}.safetensors", nbytes, crc32).items():
            parts.setdefault(path, []).append(part)
    found = {}
    for path, _, shape, *_ in manifest["leaves"]:
        if path.startswith(PREFIXES):
            whole = torch.cat(parts.get(path, [torch.empty(0)])).reshape(shape)
            found[path.partition(".")[2]] = whole.float() if whole.is_floating_point() else whole
    return found


def main() -> None:
    """Read a checkpoint, and write a state dict."""
    parser = argparse.ArgumentParser(description="Write the weights of a checkpoint of fzero as a state dict of torch.")
    parser.add_argument("checkpoint_dir", help="the folder that was given to save_checkpoint")
    parser.add_argument("output", help="a file .bin or .pt, or a folder, which gets pytorch_model.bin")
    parser.add_argument("-t", "--tag", help="by default the one in the file 'latest'")
    given = parser.parse_args()
    values = get_fp32_state_dict_from_zero_checkpoint(given.checkpoint_dir, given.tag)
    file = Path(given.output)
    file = file if file.suffix in (".bin", ".pt") else file / "pytorch_model.bin"
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, file)
    print(f"{len(values)} tensors of {given.checkpoint_dir} in {file}")


if __name__ == "__main__":
    main()
