#!/usr/bin/env bash
# Everything that only a GPU can tell about the kernels, in a few minutes, from the repository's root:
#   bash benchmarks/check_gpu.sh OUT_FOLDER
# Bitwise tests, benchmarks, memcheck; a part that fails does not stop the others.
out=${1:?usage: bash benchmarks/check_gpu.sh OUT_FOLDER}
mkdir -p "$out"
part() {  # part LIMIT_S NAME COMMAND...
  local limit=$1 name=$2
  shift 2
  echo "=== $name"
  timeout -k 5 "$limit" "$@" 2>&1 | tail -n 40
  echo "=== $name: exit status ${PIPESTATUS[0]}"
}
{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  part 120 "bitwise" env TORCH_COMPILE_DISABLE=0 python3 -m pytest -q -n 8 --dist worksteal -p no:benchmark \
    tests/kernels/test_bitwise.py tests/kernels/test_fixed_tile.py tests/quant/test_quant_on_cuda.py tests/model/test_decoder_on_cuda.py
  part 180 "quantize" python3 -m benchmarks.quantize --out "$out/quantize"
  part 60 "memcheck, bare" python3 -m tests.kernels.memcheck
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2> /dev/null | head -1)
  if [ -n "$sanitizer" ]; then
    part 200 "memcheck" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool memcheck --report-api-errors no \
      --error-exitcode 9 python3 -m tests.kernels.memcheck
  fi
  part 30 "quantized linear" python3 benchmarks/quantized_linear.py --device cuda --repeats 5 --out "$out"
} | tee "$out/check_gpu.txt"
