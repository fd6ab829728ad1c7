"""A failed log gets its cause and remedy, the most specific one, and a healthy log gets none."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.configs.read import ConfigError
from trtpipe.engines.errors import StageFailed
from trtpipe.pipeline.execution import diagnosis
from trtpipe.pipeline.execution.diagnosis import (
    LINE_CHARS,
    Where,
    diagnose,
    disabled_features,
    explain,
    load_failures,
)

# What trtllm-build 1.2.1 writes when all is well. The warnings about memory are about tactics that are passed over;
# the missing libefa is Open MPI's, which does without.
HEALTHY_BUILD = """\
[gpu-7:36347] mca_base_component_repository_open: unable to open mca_mtl_ofi: libefa.so.1: cannot open shared object \
file: No such file or directory (ignored)
2026-11-20 08:05:58,120 - INFO - flashinfer.jit: Prebuilt kernels not found, using JIT backend
[TensorRT-LLM] TensorRT-LLM version: 1.2.1
[11/20/2026-08:06:02] [TRT-LLM] [I] Set gpt_attention_plugin to auto.
[11/20/2026-08:06:02] [TRT-LLM] [I] Set use_paged_context_fmha to True.
[11/20/2026-08:06:02] [TRT-LLM] [W] Implicitly setting LLaMAConfig.producer = {'name': 'modelopt', 'version': '0.47'}
[11/20/2026-08:06:02] [TRT-LLM] [W] Implicitly setting LLaMAConfig.tie_word_embeddings = False
[11/20/2026-08:06:02] [TRT-LLM] [I] Compute capability: (9, 0)
[11/20/2026-08:06:02] [TRT-LLM] [I] Total Memory: 80 GiB
[11/20/2026-08:06:02] [TRT-LLM] [I] Set paged_kv_cache to True.
[11/20/2026-08:06:02] [TRT-LLM] [W] Overriding paged_state to False
[11/20/2026-08:06:04] [TRT-LLM] [W] Provided but not required tensors: {'transformer.layers.0.attention.embed'}
[11/20/2026-08:06:04] [TRT-LLM] [W] padding removal and fMHA are both enabled, max_input_len is not required and \
will be ignored
[11/20/2026-08:06:04] [TRT-LLM] [W] FP8 Context FMHA is enabled to support FP8 Paged Context FMHA.
[11/20/2026-08:06:05] [TRT] [I] [MemUsageChange] Init CUDA: CPU +13, GPU +0, now: CPU 230, GPU 417 (MiB)
[11/20/2026-08:06:07] [TRT] [I] [MemUsageChange] Init builder kernel library: CPU +1973, GPU +350, now: CPU 2339, \
GPU 767 (MiB)
[11/20/2026-08:06:07] [TRT-LLM] [I] Set nccl_plugin to None.
[11/20/2026-08:06:08] [TRT-LLM] [I] Total optimization profiles added: 1
[11/20/2026-08:06:09] [TRT-LLM] [I] Build TensorRT engine Unnamed Network 0
[11/20/2026-08:06:09] [TRT] [W] Unused Input: position_ids
[11/20/2026-08:06:09] [TRT] [W] Missing scale and zero-point for tensor input_ids, expect fall back to non-int8 \
implementation for any layer consuming or producing given tensor
[11/20/2026-08:06:14] [TRT] [I] Some tactics do not have sufficient workspace memory to run. Increasing workspace \
size will enable more tactics, please check verbose output for requested sizes.
[11/20/2026-08:06:14] [TRT] [W] Tactic Device request: 157500MB Available: 40339MB. Device memory is insufficient to \
use tactic.
[11/20/2026-08:06:14] [TRT] [E] [virtualMemoryBuffer.cpp::resizePhysical::154] Error Code 2: OutOfMemory (Requested \
size was 17179869184 bytes.)
[11/20/2026-08:06:14] [TRT] [W] Requested amount of GPU memory (17179869184 bytes) could not be allocated. There may \
not be enough free memory for allocation to succeed.
[11/20/2026-08:06:14] [TRT] [W] UNSUPPORTED_STATE: Skipping tactic 9 due to insufficient memory on requested size of \
157500 detected for tactic 0x0000000000000009.
[11/20/2026-08:06:14] [TRT] [V] Out of memory is avoided by freeing 512 MiB of scratch before the next tactic
[11/20/2026-08:07:01] [TRT] [I] Total Host Persistent Memory: 89248 bytes
[11/20/2026-08:07:02] [TRT] [I] [MemUsageStats] Peak memory usage during Engine building and serialization: CPU: \
33125 MiB
[11/20/2026-08:07:05] [TRT-LLM] [I] Total time of building Unnamed Network 0: 00:00:56
[11/20/2026-08:07:05] [TRT-LLM] [I] Build phase peak memory: 33125.61 MB, children: 17.62 MB
[11/20/2026-08:07:20] [TRT-LLM] [I] Total time of building all engines: 00:01:18
"""

# tritonserver 2.51 on a machine without a GPU: it says so loudly, and serves.
HEALTHY_CPU = """\
W1121 18:03:47.166119 16136 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory, pinned memory \
pool will not be available: CUDA driver version is insufficient for CUDA runtime version"
I1121 18:03:47.166213 16136 cuda_memory_manager.cc:117] "CUDA memory pool disabled"
E1121 18:03:47.166271 16136 server.cc:241] "CudaDriverHelper has not been initialized."
I1121 18:03:47.167877 16136 model_lifecycle.cc:472] "loading: preprocessing:1"
I1121 18:03:47.174949 16136 python_be.cc:2249] "TRITONBACKEND_ModelInstanceInitialize: preprocessing_0_0 (CPU device 0)"
I1121 18:03:47.324269 16136 model_lifecycle.cc:839] "successfully loaded 'preprocessing'"
Error: Failed to initialize NVML
W1121 18:03:47.325493 16136 metrics.cc:798] "DCGM unable to start: DCGM initialization error"
I1121 18:03:47.325624 16136 metrics.cc:770] "Collecting CPU metrics"
I1121 18:03:47.327221 16136 grpc_server.cc:2558] "Started GRPCInferenceService at 127.0.0.1:38895"
I1121 18:03:47.327457 16136 http_server.cc:4713] "Started HTTPService at 127.0.0.1:51079"
I1121 18:03:47.368948 16136 http_server.cc:362] "Started Metrics Service at 127.0.0.1:33461"
Signal (15) received.
I1121 18:03:51.092128 16136 server.cc:305] "Waiting for in-flight requests to complete."
I1121 18:03:51.095281 16136 server.cc:345] "Timeout 15: Found 1 live models and 0 in-flight non-inference requests"
"""

# The TensorRT-LLM backend on two GPUs.
HEALTHY_GPU = """\
I1120 09:18:49.182317 331 pinned_memory_manager.cc:277] "Pinned memory pool is created at '0x7f3488000000' with size \
268435456"
I1120 09:18:49.185004 331 cuda_memory_manager.cc:107] "CUDA memory pool is created on device 0 with size 67108864"
[TensorRT-LLM][WARNING] kv_cache_host_memory_bytes not set, defaulting to 0
[TensorRT-LLM][WARNING] [json.exception.type_error.302] type must be number, but is null
[TensorRT-LLM][WARNING] Optional value for parameter max_num_tokens will not be set.
[TensorRT-LLM][INFO] Engine version 1.2.1 found in the config file, assuming engine(s) built by new builder API.
[TensorRT-LLM][INFO] MPI size: 2, MPI local size: 2, rank: 0
[TensorRT-LLM][WARNING] Fix optionalParams : KV cache reuse disabled because model was not built with paged context \
FMHA support
gpu-7:5010:5090 [0] NCCL INFO NET/Plugin: Failed to find ncclNetPlugin_v7 symbol.
gpu-7:5010:5090 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM
[TensorRT-LLM][INFO] TRTGptModel maxBeamWidth: 1
[TensorRT-LLM][INFO] TRTGptModel maxInputLen: 8192 = min(maxSequenceLen - 1, maxNumTokens) since context FMHA and \
usePackedInput are enabled
[TensorRT-LLM][INFO] Loaded engine size: 7696 MiB
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1612.51 MiB for execution context memory.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 7.40 MB GPU memory for runtime buffers.
[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 79.11 GiB, available: 68.02 GiB
[TensorRT-LLM][INFO] Max tokens in paged KV cache: 457824. Allocating 60007907328 bytes.
[TensorRT-LLM][INFO] kv_cache_free_gpu_mem_fraction 0.9 leaves 7.6 GiB, so that CUDA does not run out of memory
I1120 09:18:58.796012 331 model_lifecycle.cc:839] "successfully loaded 'tensorrt_llm'"
I1120 09:18:59.327457 331 http_server.cc:4713] "Started HTTPService at 0.0.0.0:8000"
"""

HEALTHY = {"build": (HEALTHY_BUILD,), "serve": (HEALTHY_CPU, HEALTHY_GPU)}

# An excerpt for every entry: lines as the programs write them, with what usually stands around them.
BUILD = {
    "fp8-needs-newer-gpu": """\
[04/09/2026-16:26:41] [TRT] [E] 9: [standardEngineBuilder.cpp::buildEngine::2266] Error Code 9: Internal Error \
(Networks with FP8 precision require hardware with FP8 support.)
[04/09/2026-16:26:41] [TRT-LLM] [E] Engine building failed, please check the error log.
""",
    "fp8-attention-not-for-this-gpu": """\
terminate called after throwing an instance of 'tensorrt_llm::common::TllmException'
  what():  [TensorRT-LLM][ERROR] Assertion failed: FP8 FMHA cannot be enabled except on Ada or Hopper or Blackwell \
Arch. (/code/tensorrt_llm/cpp/tensorrt_llm/common/attentionOp.cpp:2357)
""",
    "fp8-attention-incomplete": """\
    raise RuntimeError(
RuntimeError: FP8 Paged Context FMHA only works with fp8 quantization workflow currently.
""",
    "int8-cache-with-paged-attention": """\
    raise RuntimeError(
RuntimeError: Paged Context FMHA doesn't work with int8 kv cache currently.
""",
    "integer-precision-not-for-this-gpu": "RuntimeError: SmoothQuant is not supported on SM>=100.\n",
    "bf16-needs-newer-gpu": """\
RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Unsupported data type, pre SM 80 GPUs do not support bfloat16 \
(/src/tensorrt_llm/cpp/tensorrt_llm/plugins/gptAttentionCommon/gptAttentionCommon.cpp:412)
""",
    "gpu-unsupported": """\
  what():  [TensorRT-LLM][ERROR] Assertion failed: Unsupported architecture \
(/tensorrt_llm/cpp/tensorrt_llm/kernels/contextFusedMultiHeadAttention/fmhaRunner.cpp:89)
""",
    "no-kernel-image": """\
RuntimeError: CUDA error: no kernel image is available for execution on the device
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
""",
    "architecture-unknown": """\
    assert architecture in MODEL_MAP, \\
           ^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError: Unsupported model architecture: Llama4ForConditionalGeneration
""",
    "checkpoint-of-another-version": """\
    mapping = Mapping(world_size=world_size,
TypeError: Mapping.__init__() got an unexpected keyword argument 'attn_tp_size'
""",
    "rope-scaling-unknown": """\
  File "/usr/local/lib/python3.10/dist-packages/tensorrt_llm/commands/build.py", line 468, in main
    rotary_type = rotary_scaling['type']
KeyError: 'type'
""",
    "head-tied": """\
  File "/usr/local/lib/python3.10/dist-packages/tensorrt_llm/models/llama/convert.py", line 211, in get_weight
    if named_params[prefix + '.weight'].dtype != dtype:
KeyError: 'lm_head.weight'
""",
    "cache-scales-missing": """\
[03/11/2026-16:45:16] [TRT] [E] 4: [standardEngineBuilder.cpp::initCalibrationParams::1837] Error Code 4: Internal \
Error (Calibration failure occurred with no scaling factors detected. This could be due to no int8 calibrator or \
insufficient custom scales for network layers.)
""",
    "weight-scales-missing": """\
RuntimeError: Required but not provided tensors:{'transformer.layers.4.mlp.proj.per_channel_scale', \
'transformer.layers.0.attention.qkv.per_channel_scale'}
""",
    "tensors-missing": """\
  File "/usr/local/lib/python3.12/dist-packages/tensorrt_llm/models/modeling_utils.py", line 684, in load
    raise RuntimeError(
RuntimeError: Required but not provided tensors:{'transformer.ln_f.weight', 'transformer.layers.31.mlp.fc.weight'}
""",
    "tensor-shape": """\
AssertionError: The value updated is not the same shape as the original. Updated: (4608, 4096), original: (2304, 4096)

During handling of the above exception, another exception occurred:

RuntimeError: Encounter error 'The value updated is not the same shape as the original. Updated: (4608, 4096), \
original: (2304, 4096)' for parameter 'transformer.layers.0.attention.qkv.weight'
""",
    "rank-file-missing": """\
  File "/usr/local/lib/python3.12/dist-packages/tensorrt_llm/models/modeling_utils.py", line 742, in from_checkpoint
    assert os.path.isfile(weights_path)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^
AssertionError
""",
    "checkpoint-missing": """\
    with open(config_file) as f:
         ^^^^^^^^^^^^^^^^^
FileNotFoundError: [Errno 2] No such file or directory: '/checkpoints/llama3-8b/config.json'
""",
    "heads-do-not-divide": "AssertionError: num_attention_heads must be divisible by tp_size\n",
    "world-size-wrong": """\
ValueError: world_size must equal to tp_size * pp_size * cp_size, but got 4 != 2 * 1 * 1.
""",
    "awq-groups-do-not-fit": """\
NotImplementedError: Weight shape is not divisible for block size for block quantization.
""",
    "weights-not-downloaded": """\
    with safe_open(checkpoint_file, framework="pt") as f:
safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge
""",
    "weights-damaged": """\
    with safe_open(checkpoint_file, framework="pt") as f:
safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer
""",
    "option-refused": """\
usage: trtllm-build [-h] [--checkpoint_dir CHECKPOINT_DIR]
trtllm-build: error: unrecognized arguments: --kv_cache_type paged
""",
    "trtllm-build-gone": "bash: line 1: trtllm-build: command not found\n",
    "tensorrt-llm-missing": """\
  File "/workspace/TensorRT-LLM/tensorrt_llm/_utils.py", line 42, in <module>
    from tensorrt_llm.bindings import DataType
ModuleNotFoundError: No module named 'tensorrt_llm.bindings'
""",
    "plugin-missing": """\
[10/25/2026-03:51:35] [TRT] [E] 3: getPluginCreator could not find plugin: Gemmtensorrt_llm version: 1
""",
    "libraries-mixed": """\
ImportError: /usr/local/lib/python3.10/dist-packages/tensorrt_llm/bindings.cpython-310-x86_64-linux-gnu.so: undefined \
symbol: _ZN3c106detail14torchCheckFailEPKcS2_jRKSs
""",
    "driver-library-missing": """\
    import tensorrt_llm
ImportError: libcuda.so.1: cannot open shared object file: No such file or directory
""",
    "tensorrt-library-missing": """\
    from .tensorrt import *
ImportError: libnvinfer.so.10: cannot open shared object file: No such file or directory
""",
    "mpi-library-missing": """\
    from mpi4py import MPI
RuntimeError: cannot load MPI library
libmpi.so.40: cannot open shared object file: No such file or directory
""",
    "library-missing": """\
    from tensorrt_llm.bindings import DataType, GptJsonConfig
ImportError: libpython3.10.so.1.0: cannot open shared object file: No such file or directory
""",
    "driver-too-old": """\
RuntimeError: [TensorRT-LLM][ERROR] CUDA runtime error in cudaGetDevice(&device): forward compatibility was attempted \
on non supported HW (/src/tensorrt_llm/cpp/tensorrt_llm/common/cudaUtils.h:260)
""",
    "no-gpu": """\
  File "/usr/local/lib/python3.12/dist-packages/torch/cuda/__init__.py", line 412, in _lazy_init
RuntimeError: No CUDA GPUs are available
""",
    "too-few-gpus": """\
    torch.cuda.set_device(gpu_id)
RuntimeError: CUDA error: invalid device ordinal
""",
    "gpu-fault": """\
[11/08/2026-23:35:12] [TRT] [E] Error Code 1: Cuda Runtime (an illegal memory access was encountered)
""",
    "quantization-out-of-memory": """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 514.00 MiB. GPU 0 has a total capacity of 79.14 GiB of \
which 21.25 MiB is free.
""",
    "weights-do-not-fit": """\
[08/11/2026-06:10:36] [TRT] [E] [virtualMemoryBuffer.cpp::resizePhysical::151] Error Code 2: OutOfMemory (Requested \
size was 16654532608 bytes.)
[08/11/2026-06:10:36] [TRT] [E] [globWriter.cpp::makeResizableGpuMemory::435] Error Code 2: OutOfMemory (Requested \
size was 16654532608 bytes.)
[08/11/2026-06:10:36] [TRT-LLM] [E] Engine building failed, please check the error log.
""",
    "no-tactic-fits": """\
[11/20/2026-08:06:14] [TRT] [E] IBuilder::buildSerializedNetwork: Error Code 10: Internal Error (Could not find any \
implementation for node LLaMAForCausalLM/transformer/layers/0/mlp/fc/MATRIX_MULTIPLY_0.)
""",
    "cuda-out-of-memory": """\
[11/20/2026-08:06:14] [TRT] [E] Error Code 1: Cuda Runtime (out of memory)
AssertionError: Engine building failed, please check the error log.
""",
    "shared-memory-full": """\
gpu-7:21858:21858 [2] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-Y4njUk to 9637892 bytes
""",
    "disk-full": """\
    f.write(engine)
OSError: [Errno 28] No space left on device
""",
    "host-out-of-memory": "what():  std::bad_alloc\n",
    "killed": "/entrypoint.sh: line 3:    27 Killed\nKilled\n",
    "worker-died": """\
concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the future \
was running or pending.
""",
    "nccl-failed": """\
[TensorRT-LLM][ERROR] Failed, NCCL error /src/tensorrt_llm/cpp/tensorrt_llm/runtime/ncclCommunicator.cpp:122 'internal \
error - please report this issue to the NCCL developers'
""",
    "mpi-as-root": """\
--------------------------------------------------------------------------
mpirun has detected an attempt to run as root.
""",
    "mpi-missing": "FileNotFoundError: [Errno 2] No such file or directory: 'mpirun'\n",
    "mpi-slots": """\
There are not enough slots available in the system to satisfy the 2
slots that were requested by the application:
""",
    "slurm-without-mpi": """\
The application appears to have been direct launched using "srun",
but OMPI was not built with SLURM's PMI support and therefore cannot
execute.
""",
    "permission-denied": """\
    os.makedirs(args.output_dir, exist_ok=True)
PermissionError: [Errno 13] Permission denied: '/engines/llama3-8b'
""",
    "numpy-too-new": """\
A module that was compiled using NumPy 1.x cannot be run in
NumPy 2.1.2 as it may crash. To support both 1.x and 2.x
AttributeError: _ARRAY_API not found
""",
}

# Where Triton ends in the same way, whatever the model's own words.
LOAD = "E1121 18:04:17.283479 17018 model_lifecycle.cc:642] \"failed to load 'tensorrt_llm' version 1: "
CREATE = LOAD + "Internal: unexpected error when creating modelInstanceState: "
ASSERTION = CREATE + "[TensorRT-LLM][ERROR] Assertion failed: "
FRAME = r"\n1       0x7f763fc7d4d2 /opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so(+0x164d2)"
END = "error: creating server: Internal - failed to load all models\n"

SERVE = {
    "engine-of-another-gpu": """\
[TensorRT-LLM][ERROR] IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file is \
generated on an incompatible device, expecting compute 8.6 got compute 8.0, please rebuild.)
[TensorRT-LLM][ERROR] Assertion failed: Failed to deserialize cuda engine. (tllmRuntime.cpp:239)
""",
    "engine-of-another-tensorrt": """\
[TensorRT-LLM][ERROR] 6: The engine plan file is not compatible with this version of TensorRT, expecting library \
version 9.2.0.5 got 9.3.0.1, please rebuild.
""",
    "engine-format": """\
[TensorRT-LLM][ERROR] 1: [stdArchiveReader.cpp::stdArchiveReaderInitCommon::47] Error Code 1: Serialization \
(Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current \
Version: 228, Serialized Engine Version: 237)
""",
    "engine-plugin-missing": """\
[TensorRT-LLM][ERROR] IPluginRegistry::getCreator: Error Code 4: API Usage Error (Cannot find plugin: GPTAttention, \
version: 1, namespace:tensorrt_llm.)
""",
    "engine-damaged": """\
[TensorRT-LLM][ERROR] coreReadArchive.cpp (31) - Serialization Error in verifyHeader: 0 (Magic tag does not match)
""",
    "engine-missing": f"""\
{ASSERTION}Error opening engine file: /repo/tensorrt_llm/1/rank0.engine (/app/tensorrt_llm/rawEngine.cpp:42){FRAME}"
""",
    "engine-folder-wrong": f"""\
{CREATE}[json.exception.parse_error.101] parse error at line 1, column 1: syntax error while parsing value"
""",
    "world-size-wrong": f"""\
{ASSERTION}MPI size 1 != TP size 2 * PP size 1 * CP Size 1 (/workspace/tensorrt_llm/worldConfig.cpp:96){FRAME}"
""",
    "world-size-not-the-engine-s": f"""\
{ASSERTION}With communicationMode kLEADER, MPI worldSize is expected to be equal to tp*pp*cp when participantIds are \
not specified (/workspace/tensorrt_llm/executor/executorImpl.cpp:360){FRAME}"
""",
    "ranks-not-the-engine-s": f'{ASSERTION}tensor parallelism mismatch (/app/runtime/gptJsonConfig.cpp:61){FRAME}"\n',
    "too-few-gpus-for-the-ranks": f"""\
{ASSERTION}Number of GPUs per node 1 must be at least as large as TP (4) * PP (1) (/app/worldConfig.cpp:60){FRAME}"
""",
    "fewer-gpus-than-ranks": """\
[TensorRT-LLM][WARNING] gpusPerNode is 8 and mpiSize is 4, but only 2 GPUs detected, which is smaller than \
min(mpiSize, gpusPerNode). gpusPerNode will be set to 2
""",
    "gpu-number-wrong": f"""\
{CREATE}[TensorRT-LLM][ERROR] CUDA runtime error in cudaSetDevice(device): invalid device ordinal{FRAME}"
""",
    "limits-above-the-engine-s": f"""\
{ASSERTION}Runtime configured max batch size (128) must not exceed engine max batch size (64){FRAME}"
""",
    "prompt-does-not-fit-a-step": f"""\
{ASSERTION}Without enabling chunked context, the max context length (32767) needs to be less than or equal to the max \
number of tokens (8192). (/app/batch_manager/trtGptModelInflightBatching.cpp:410){FRAME}"
""",
    "chunked-context-not-built": f"""\
{ASSERTION}Chunked context requires context FMHA, paged kv_cache and paged context FMHA all enabled at the same \
time.{FRAME}"
""",
    "cache-reuse-not-built": f"""\
{ASSERTION}When KV cache block reuse is set, model has to be built with paged context FMHA support{FRAME}"
""",
    "cache-too-small": f"""\
[TensorRT-LLM][INFO] Using 693 tokens in paged KV cache.
{CREATE}maxTokensInPagedKvCache must be large enough to process at least 1 sequence to completion (i.e. must be larger \
than beam_width * tokensPerBlock * maxBlocksPerSeq)"
""",
    "template-value-missing": """\
[libprotobuf ERROR /tmp/tritonbuild/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: \
3:17: Expected integer, got: $
E1121 18:03:53.376354 16219 model_repository_manager.cc:1460] "Poll failed for model directory 'preprocessing': failed \
to read text proto from /repo/preprocessing/config.pbtxt"
""",
    "config-malformed": """\
[libprotobuf ERROR /tmp/tritonbuild/protobuf/text_format.cc:337] Error parsing text-format inference.ModelConfig: \
12:9: Message type "inference.ModelConfig" has no field named "max_batchsize".
""",
    "backend-not-filled-in": LOAD
    + "Invalid argument: unable to find backend library for backend '${triton_backend}', try specifying runtime on the "
    'model configuration."\n',
    "backend-missing": LOAD
    + "Invalid argument: unable to find backend library for backend 'tensorrtllm', try specifying runtime on the model "
    'configuration."\n',
    "backend-mixed": LOAD
    + "Not found: unable to load shared library: /opt/tritonserver/backends/tensorrtllm/libtriton_tensorrtllm.so: "
    'undefined symbol: _ZNK12tensorrt_llm8executor8Response11getErrorMsgB5cxx11Ev"\n',
    "ensemble-types-differ": """\
E1121 18:04:37.759334 17575 model_repository_manager.cc:703] "Invalid argument: in ensemble ensemble, ensemble tensor \
prompt_embedding_table: inconsistent data type: TYPE_FP16 is inferred from model ensemble while TYPE_BF16 is inferred \
from model tensorrt_llm"
""",
    "gpu-instance-without-gpu": LOAD
    + "Invalid argument: instance group preprocessing_0 of model preprocessing has kind KIND_GPU but no GPUs are "
    'available"\n',
    "config-missing": """\
E1121 18:04:35.397024 17427 model_repository_manager.cc:1460] "Poll failed for model directory 'engine': failed to \
open text file for read /repo/engine/config.pbtxt: No such file or directory"
""",
    "version-missing": """\
E1121 18:04:40.842305 17723 model_repository_manager.cc:724] "failed to load model 'preprocessing': at least one \
version must be available under the version policy of model 'preprocessing'"
""",
    "parameter-missing": LOAD
    + r"Internal: ValueError: parameter tokenizer_dir is missing from config.pbtxt\n\nAt:"
    + "\n",
    "tokenizer-missing": LOAD
    + r"Internal: FileNotFoundError: no tokenizer.json in /repo/tokenizer\n\nAt:\n  model.py(5): initialize\n"
    + '"\n',
    "tokenizer-unknown": LOAD
    + r"Internal: ValueError: Tokenizer class BaichuanTokenizer does not exist or is not currently imported.\n\nAt:"
    + "\n",
    "tensorrt-llm-missing": LOAD + r"Internal: ModuleNotFoundError: No module named 'tensorrt_llm'\n\nAt:\n" + '"\n',
    "module-missing": LOAD + r"Internal: ModuleNotFoundError: No module named 'tokenizers'\n\nAt:\n" + '"\n',
    "numpy-too-new": LOAD + r"Internal: AttributeError: _ARRAY_API not found\n\nAt:\n" + '"\n',
    "shared-memory-full": LOAD
    + "Internal: Unable to initialize shared memory key 'triton_python_backend_shm_region_fe4e45e7' to requested size "
    "(1048576 bytes). If you are running Triton inside docker, use '--shm-size' flag to control the shared memory "
    "region size. Each Python backend model instance requires at least 1 MB of shared memory. Error: No space left on "
    'device"\n',
    "stub-library-missing": """\
/backends/python/triton_python_backend_stub: error while loading shared libraries: libcudart-09529672.so.12.6.77: \
cannot open shared object file: No such file or directory
""",
    "stub-missing": LOAD
    + "Not found: triton_python_backend_stub is not found. Searched paths: /opt/backends/python and /opt/backends"
    '/python"\n',
    "permission-denied": LOAD
    + r"Internal: PermissionError: [Errno 13] Permission denied: '/repo/tensorrt_llm/1/rank0.engine'\n\nAt:\n"
    + '"\n',
    "repository-unreadable": """\
E1121 18:04:35.397024 17427 model_repository_manager.cc:1460] "Poll failed for model directory 'ensemble': failed to \
open text file for read /repo/ensemble/config.pbtxt: Permission denied"
""",
    "disk-full": "OSError: [Errno 28] No space left on device: '/tmp/folderXq1'\n",
    "port-taken": """\
E1121 18:04:12.080263 16580 main.cc:257] "failed to start HTTP service: Unavailable - Socket '127.0.0.1:43773' already \
in use "
""",
    "driver-library-missing": """\
tritonserver: error while loading shared libraries: libnvidia-ml.so.1: cannot open shared object file: No such file or \
directory
""",
    "library-missing": LOAD
    + "Not found: unable to load shared library: libnvinfer_plugin_tensorrt_llm.so.10: cannot open shared object file: "
    'No such file or directory"\n',
    "driver-too-old": f"""\
{CREATE}[TensorRT-LLM][ERROR] CUDA runtime error in cudaGetDeviceCount(&count): CUDA driver version is insufficient \
for CUDA runtime version (/app/cudaUtils.h:260){FRAME}"
""",
    "no-gpu": f"""\
{CREATE}[TensorRT-LLM][ERROR] CUDA runtime error in cudaGetDeviceCount(&deviceCount): no CUDA-capable device is \
detected (/app/worldConfig.cpp:107){FRAME}"
""",
    "no-kernel-image": """\
[TensorRT-LLM][ERROR] Encountered error for requestId 846930887: Encountered an error in forward function: \
[TensorRT-LLM][ERROR] CUDA runtime error in cub::DeviceSegmentedRadixSort::SortPairsDescending(stream): no kernel \
image is available for execution on the device (/app/tensorrt_llm/cpp/tensorrt_llm/kernels/samplingTopPKernels.cu:1078)
""",
    "cuda-out-of-memory": f"""\
{CREATE}[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, mCudaStream->get()): out of memory \
(/app/tensorrt_llm/cpp/tensorrt_llm/runtime/tllmBuffers.h:112){FRAME}"
""",
    "gpu-fault": """\
[TensorRT-LLM][ERROR] Encountered an error in forward function: CUDA runtime error in cudaEventSynchronize(get()): an \
illegal memory access was encountered (/app/tensorrt_llm/runtime/cudaEvent.h:66)
""",
    "nccl-failed": f"""\
{CREATE}[TensorRT-LLM][ERROR] NCCL error /app/tensorrt_llm/plugins/ncclPlugin/sendPlugin.cpp:129 'invalid usage (run \
with NCCL_DEBUG=WARN for details)'{FRAME}"
""",
    "mpi-as-root": "mpirun has detected an attempt to run as root.\n",
    "mpi-missing": "/bin/sh: 1: mpirun: not found\n",
    "mpi-slots": "There are not enough slots available in the system to satisfy the 8 slots\n",
    "slurm-without-mpi": """\
The application appears to have been direct launched using "srun",
but OMPI was not built with SLURM support.
""",
    "host-out-of-memory": "[Fri Nov 20 09:18:59 2026] Out of memory: Killed process 331 (tritonserver) total-vm:91GB\n",
    "killed": "tritonserver ended by itself (status -9)\n",
    "engine-unreadable": f"""\
{ASSERTION}Failed to deserialize cuda engine. (/app/tensorrt_llm/runtime/tllmRuntime.cpp:239){FRAME}"
""",
    "engine-config-old": """\
[TensorRT-LLM][ERROR] Missing kv_cache_type field in builder_config, you need to rebuild engine. Default to continuous \
kv cache.
""",
    "stub-died": LOAD + "Internal: Stub process 'preprocessing_0_0' is not healthy.\"\n",
    "stub-silent": LOAD
    + "Internal: Timed out occurred while waiting for the stub process. Failed to initialize model instance "
    'preprocessing_0_0"\n',
    "grpc-cancellation-race": """\
E1122 02:13:37.646180210    3155 sync.cc:105]                          ASSERTION FAILED: prior > 0
Signal (6) received.
""",
    "server-crashed": """\
Signal (11) received.
 0# 0x000056053C9D9E3D in /opt/tritonserver/bin/tritonserver
""",
    "prompt-too-long": """\
[TensorRT-LLM][ERROR] Encountered an error when fetching new request: Prompt length (9201) exceeds maximum input \
length (8192). Set log level to info and check TRTGptModel logs for how maximum input length is set
""",
    "beam-width-too-large": """\
[TensorRT-LLM][ERROR] Encountered an error in forward function: [TensorRT-LLM][ERROR] Assertion failed: Requested beam \
width 4 is larger than configured max beam width 1 (/app/batch_manager/trtGptModelInflightBatching.cpp:1689)
""",
    "beam-width-differs": """\
[TensorRT-LLM][ERROR] Assertion failed: Request with beam width 4 differs from the max beam width 12 \
(/app/batch_manager/trtGptModelInflightBatching.cpp:401)
""",
    "streaming-without-decoupled": """\
E1120 10:02:11.112211 331 instance_state.cc:88] "[TensorRT-LLM][ERROR] Streaming is only supported if model is \
deployed using decoupled mode."
""",
    "decoupled-without-streaming": """\
{"error":"HTTP end point doesn't support models with decoupled transaction policy"}
""",
    "stop-without-id": """\
E1120 10:02:11.112211 331 instance_state.cc:88] "Trying to stop a request but request ID is not provided"
""",
}

EXCERPTS: dict[Where, dict[str, str]] = {"build": BUILD, "serve": SERVE}
CASES = [(where, name) for where, excerpts in EXCERPTS.items() for name in excerpts]
WHERES: tuple[Where, ...] = get_args(Where)


@pytest.mark.parametrize("where", WHERES)
def test_every_fact_has_an_excerpt(where: Where) -> None:
    assert set(EXCERPTS[where]) == {failure.name for failure in load_failures(where)}


@pytest.mark.parametrize("where", WHERES)
def test_causes_and_remedies_are_phrases(where: Where) -> None:
    for failure in load_failures(where):
        for phrase in (failure.cause, failure.remedy, failure.source):
            assert phrase
            assert phrase == phrase.strip()
            assert not phrase.endswith(".") or phrase.endswith("..")  # `build.max_num_tokens=..`


@pytest.mark.parametrize(("where", "name"), CASES)
def test_each_failure_is_named_from_its_log(where: Where, name: str) -> None:
    found = diagnose(EXCERPTS[where][name], where)
    assert found is not None
    assert found.failure == name
    assert 0 < len(found.line) <= LINE_CHARS
    # Every group that the phrases use had a value.
    assert "?" not in found.cause + found.remedy


@pytest.mark.parametrize(("where", "name"), CASES)
def test_each_failure_is_named_amid_all_that_a_healthy_log_says(where: Where, name: str) -> None:
    for healthy in HEALTHY[where]:
        log = healthy + EXCERPTS[where][name] + (END if where == "serve" else "")
        found = diagnose(log.replace("\n", "\x1b[0m\r\n\x1b[31;1m"), where)
        assert found is not None
        assert found.failure == name
        assert "\x1b" not in found.line


@pytest.mark.parametrize(("where", "log"), [(where, log) for where in WHERES for log in HEALTHY[where]])
def test_a_healthy_log_is_not_diagnosed(where: Where, log: str) -> None:
    assert diagnose(log, where) is None


@pytest.mark.parametrize("where", WHERES)
def test_a_log_that_says_nothing_is_not_diagnosed(where: Where) -> None:
    assert diagnose("", where) is None
    assert diagnose("error: creating server: Internal - failed to load all models\n", where) is None


def test_what_the_log_tells_is_in_the_words() -> None:
    found = diagnose(SERVE["engine-of-another-gpu"], "serve")
    assert found is not None
    assert found.cause == "the engine was built for compute capability 8.0, and this GPU has 8.6"
    assert found.line.startswith("IRuntime::deserializeCudaEngine: Error Code 6: API Usage Error (The engine plan file")
    shape = diagnose(BUILD["tensor-shape"], "build")
    assert shape is not None
    assert shape.cause == (
        "transformer.layers.0.attention.qkv.weight has the shape (4608, 4096) where the network needs (2304, 4096)"
    )
    template = diagnose(SERVE["template-value-missing"], "serve")
    assert template is not None
    assert template.cause == "line 3 of a config.pbtxt still holds a ${token} of its template"


@pytest.mark.parametrize(
    ("where", "log", "name"),
    [
        # An engine of another GPU is not merely one that cannot be read.
        ("serve", SERVE["engine-unreadable"] + SERVE["engine-of-another-gpu"], "engine-of-another-gpu"),
        # A stub that ends has a reason.
        ("serve", SERVE["stub-died"] + SERVE["tokenizer-missing"], "tokenizer-missing"),
        ("serve", SERVE["stub-died"] + SERVE["shared-memory-full"], "shared-memory-full"),
        # /dev/shm is no disk, whatever the words are.
        ("serve", SERVE["disk-full"] + SERVE["shared-memory-full"], "shared-memory-full"),
        # The configuration, not the memory that a wrong one takes.
        ("serve", SERVE["cuda-out-of-memory"] + SERVE["cache-too-small"], "cache-too-small"),
        # A client's long prompt did not end the server; what came later did.
        ("serve", SERVE["prompt-too-long"] + SERVE["gpu-fault"], "gpu-fault"),
        ("build", BUILD["worker-died"] + BUILD["tensor-shape"], "tensor-shape"),
        ("build", BUILD["cuda-out-of-memory"] + BUILD["weights-do-not-fit"], "weights-do-not-fit"),
        ("build", BUILD["tensors-missing"] + BUILD["weight-scales-missing"], "weight-scales-missing"),
        ("build", BUILD["host-out-of-memory"] + BUILD["disk-full"], "disk-full"),
        # That memory ran out is only said where something shows it.
        ("build", BUILD["killed"] + BUILD["host-out-of-memory"], "host-out-of-memory"),
        ("serve", SERVE["killed"] + SERVE["host-out-of-memory"], "host-out-of-memory"),
    ],
)
def test_the_most_specific_failure_wins(where: Where, log: str, name: str) -> None:
    found = diagnose(log, where)
    assert found is not None
    assert found.failure == name


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[11/20/2026-08:06:14] [TRT] [E] ",
        "[11/20/2026-08:06:14] [TRT-LLM] [E] ",
        "[TensorRT-LLM][ERROR] ",
        "E1121 18:04:12.080263 16580 main.cc:257] ",
        'E1121 18:04:12.080263 16580 main.cc:257] "[TensorRT-LLM][ERROR] ',
        "2026-11-20 08:05:58,120 - ",
        "2026-11-20T08:05:58.120Z ",
        "[2026-11-20 08:05:58] ",
    ],
)
def test_what_a_logger_puts_before_a_line_is_left_out(prefix: str) -> None:
    found = diagnose(prefix + "CUDA runtime error in cudaMalloc(&p, n): out of memory", "serve")
    assert found is not None
    assert found.line.removeprefix("[TensorRT-LLM][ERROR] ") == "CUDA runtime error in cudaMalloc(&p, n): out of memory"


def test_a_long_line_is_cut_around_what_tells() -> None:
    telling = "CUDA runtime error in cudaMalloc(&p, n): out of memory"
    for line in (telling + "y" * 500, "x" * 500 + telling + "y" * 500, "x" * 500 + telling):
        found = diagnose(line, "serve")
        assert found is not None
        assert telling in found.line
        assert len(found.line) <= LINE_CHARS
        assert "..." in (found.line[:3], found.line[-3:])


def test_an_error_gets_cause_and_remedy(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text(HEALTHY_BUILD + BUILD["fp8-needs-newer-gpu"])
    error = StageFailed("trtllm-build failed (exit status 1)", why="the last lines", remedy=f"the log is {log}")
    assert str(explain(error, log, "build")) == (
        "trtllm-build failed (exit status 1): the checkpoint is FP8, and this GPU has no FP8 units (they begin with "
        "SM 89) (9: [standardEngineBuilder.cpp::buildEngine::2266] Error Code 9: Internal Error (Networks with FP8 "
        "precision require hardware with FP8 support.)); build for an l4, l40s, h100 or h200 with --gpu, or choose "
        f"another precision such as --dtype int8; the log is {log}"
    )


def test_an_error_that_no_fact_explains_stays_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    error = StageFailed("trtllm-build failed (exit status 1)", why="the last lines", remedy="the log")
    assert explain(error, log, "build") is error  # there is no log
    log.write_text(HEALTHY_BUILD)
    assert explain(error, log, "build") is error
    assert explain(error, tmp_path, "build") is error  # nor is a folder one


def test_a_killed_process_is_told_from_the_error_alone(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text(HEALTHY_BUILD)
    error = StageFailed("trtllm-build failed (ended by SIGKILL, usually for want of memory)", why="the last lines")
    assert str(explain(error, log, "build")) == (
        "trtllm-build failed (ended by SIGKILL, usually for want of memory): it was killed (SIGKILL), most often "
        'because the machine\'s memory ran out; look for "Out of memory" in `dmesg`; if it is there, close other '
        f"programs or build on a machine with more memory; the log is {log}"
    )


def test_what_an_earlier_process_wrote_is_not_this_one_s_failure(tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text(BUILD["disk-full"])
    begin = log.stat().st_size
    with log.open("a") as file:
        file.write(BUILD["tensors-missing"])
    error = StageFailed("trtllm-build failed")
    assert explain(error, log, "build", begin).why.startswith("the checkpoint lacks tensors")
    assert explain(error, log, "build", begin + 10_000) is error


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "TAIL_BYTES", 1 << 16)
    log = tmp_path / "serve.log"
    line = 'I1120 09:18:59.327457 331 http_server.cc:4713] "another request"\n'
    filling = line * (diagnosis.TAIL_BYTES // len(line) + 1)
    error = StageFailed("tritonserver ended by itself")
    log.write_text(SERVE["port-taken"] + filling)
    assert explain(error, log, "serve") is error
    log.write_text("\N{SNOWMAN}" + filling + SERVE["port-taken"])
    assert explain(error, log, "serve").why.startswith("the HTTP address 127.0.0.1:43773 is taken")


def test_bytes_that_are_no_text_do_not_matter(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_bytes(b"\xff\xfe\x00" + SERVE["port-taken"].encode() + b"\xff")
    assert explain(StageFailed("tritonserver does not start"), log, "serve").why.startswith("the HTTP address")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("failures:\n", "failure:\n", "build.yaml: unknown key 'failure'; did you mean 'failures'?"),
        ("    cause:", "    causes:", "build.yaml: disk-full: unknown key 'causes'; did you mean 'cause'?"),
        ("    cause: the disk is full\n", "", "build.yaml: disk-full: cause: Field required"),
        ("    cause: the disk is full", "    cause: 3", "build.yaml: disk-full: cause: Input should be a valid string"),
        ("name: disk-full", "name: Disk full", "build.yaml: Disk full: the name is not in kebab case"),
        ("'(?i)no space", "'(?i)(no space", "build.yaml: disk-full: pattern is not a regular expression: missing )"),
        ("the disk is full", "the {disk}", "build.yaml: disk-full: cause: 'disk' is not the bare name of a group"),
        ("the disk is full", "the {}", "build.yaml: disk-full: cause: '' is not the bare name of a group"),
        ("free some space", "free {some space", "build.yaml: disk-full: remedy: expected '}' before end of string"),
        ("free some space", "free }some space", "build.yaml: disk-full: remedy: Single '}' encountered"),
        ("name: disk-full", "name: no-gpu", "build.yaml: no-gpu is there twice"),
        ("  - name: disk-full\n", "  - disk-full\n  -\n", "build.yaml: failures must be a list of mappings"),
    ],
)  # fmt: skip
def test_damaged_facts_name_the_entry(facts: Path, old: str, new: str, message: str) -> None:
    path = facts / "failures" / "build.yaml"
    before, mark, after = path.read_text().partition("  - name: disk-full\n")
    entry = (mark + after).replace(old, new, 1) if old in mark + after else mark + after
    head = before.replace(old, new, 1) if entry == mark + after else before
    assert head + entry != path.read_text()
    path.write_text(head + entry)
    with pytest.raises(ConfigError) as caught:
        diagnose("anything", "build")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["failures:\n", "failures: []\n", "failures: {a: 1}\n", "failures: [x]\n"])
def test_facts_that_are_no_list_are_refused(facts: Path, text: str) -> None:
    (facts / "failures" / "serve.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_failures("serve")
    assert str(caught.value) == "serve.yaml: failures must be a list of mappings"


def test_a_format_in_a_phrase_is_refused(facts: Path) -> None:
    path = facts / "failures" / "build.yaml"
    path.write_text(path.read_text().replace("{architecture}", "{architecture:d}"))
    with pytest.raises(ConfigError) as caught:
        load_failures("build")
    assert "'architecture' is not the bare name of a group of the pattern" in str(caught.value)


def test_facts_are_read_once() -> None:
    assert load_failures("build") is load_failures("build")


def test_features_that_were_turned_off_are_found() -> None:
    log = HEALTHY_BUILD + (
        "[11/20/2026-08:06:04] [TRT-LLM] [W] FP8 Paged Context FMHA is disabled because it must be used together with "
        "fp8 KV Cache.\n"
        "[11/20/2026-08:06:09] [TRT-LLM] [W] FP8 Paged Context FMHA is disabled because it must be used together with "
        "fp8 KV Cache.\n"
        "\x1b[33m[11/20/2026-08:06:04] [TRT-LLM] [W] Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA "
        "are disabled.\x1b[0m\r\n"
        "[TensorRT-LLM][WARNING] Fall back to unfused MHA because of unsupported data type.\n"
        "[TensorRT-LLM][WARNING] TRT overlap is not supported with beam search and will be disabled.\n"
        "[11/20/2026-08:06:04] [TRT-LLM] [W] Fused MLP is not supported for this recipe, disabling it.\n"
    )
    assert disabled_features(log) == (
        "FP8 Paged Context FMHA is disabled because it must be used together with fp8 KV Cache.",
        "Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled.",
        "Fall back to unfused MHA because of unsupported data type.",
        "TRT overlap is not supported with beam search and will be disabled.",
        "Fused MLP is not supported for this recipe, disabling it.",
    )


def test_a_build_that_turned_nothing_off_names_nothing() -> None:
    assert disabled_features(HEALTHY_BUILD) == ()
    assert disabled_features("") == ()


LOGGED = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([line for logs in EXCERPTS.values() for log in logs.values() for line in log.splitlines()]),
        st.sampled_from(["\x1b[31m", "\x1b]0;x\x07", "\r", "\n", "\\n", "[11/20/2026-08:06:14] ", "{}", "{0!r}", '"']),
    ),
    max_size=12,
)  # fmt: skip


@given(LOGGED)
def test_no_text_makes_a_diagnosis_fail(parts: list[str]) -> None:
    text = "".join(parts)
    for where in WHERES:
        found = diagnose(text, where)
        assert found is None or (found.cause and found.remedy and 0 <= len(found.line) <= LINE_CHARS)
    assert all(len(line) <= LINE_CHARS for line in disabled_features(text))


@given(st.text(), st.integers(min_value=0, max_value=1 << 16))
def test_a_shortened_line_is_never_too_long(line: str, start: int) -> None:
    assert len(diagnosis._shorten(line * 50, min(start, len(line) * 50))) <= LINE_CHARS
