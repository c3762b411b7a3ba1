// csrc/optim/host_device.h: marks what a GPU kernel shares with the host.
#pragma once

#if defined(__CUDACC__)
#define TS_HOST_DEVICE __host__ __device__
#else
#define TS_HOST_DEVICE
#endif
