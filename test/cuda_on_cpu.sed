# cuda_on_cpu.sed: what C++ cannot say itself, so that g++ takes an untouched .cu (see cuda_on_cpu.h). One line in, one line out.
# CUDA's headers: cuda_on_cpu.h stands for them.
s@^[[:space:]]*#[[:space:]]*include[[:space:]]*<(cuda|cuda_runtime|cuda_runtime_api|cuda_bf16|cublas_v2|cufft|device_launch_parameters)\.h>@// &@
# kernel<float, 32><<<grid, block, shared, stream>>>(  becomes  cu::bind(kernel<float, 32>, "kernel<float, 32>", __FILE__, __LINE__, grid, ...)(
s/([A-Za-z_][A-Za-z0-9_:]*(<([^<>;]|<[^<>;]*>)*>)?)[[:space:]]*<<<(([^;>]|>[^>;]|>>[^>;])*)>>>[[:space:]]*\(/cu::bind(\1, "\1", __FILE__, __LINE__, \4)(/g
# extern __shared__ float4 x[];
s/extern[[:space:]]+__shared__[[:space:]]+((__align__|alignas)\([^)]*\)[[:space:]]+)?([A-Za-z_][A-Za-z_0-9: ]*)[[:space:]]+([A-Za-z_0-9]+)\[\];/\3* \4 = (\3*)cu::dynamic_shared();/g
# __shared__ float a[32], b[32];  first becomes two declarations, then each one is a static of the OS thread that runs the block
:split
s/__shared__[[:space:]]+([A-Za-z_][A-Za-z_0-9: ]*(<[^<>;]*>)?)[[:space:]]+([A-Za-z_0-9]+(\[[^],;]*\])*),[[:space:]]*/__shared__ \1 \3; __shared__ \1 /
t split
s/__shared__[[:space:]]+((__align__|alignas)\([^)]*\)[[:space:]]+)?([A-Za-z_][A-Za-z_0-9: ]*(<[^<>;]*>)?)[[:space:]]+([A-Za-z_0-9]+)((\[[^];]*\])*);/\1static thread_local \3 \5\6; cu::declare_shared(\&\5, sizeof(\5));/g
