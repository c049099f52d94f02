// `copy BYTES TIMES`: the least seconds of copies between memory and the first device, a line each.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static void must(cudaError_t error) {
    if (error != cudaSuccess) {
        fprintf(stderr, "%s\n", cudaGetErrorString(error));
        exit(1);
    }
}

static void measure(const char * name, void * to, const void * from, size_t size, int times, cudaMemcpyKind kind) {
    double least = 1e9;
    for (int i = 0; i < times; ++i) {
        must(cudaDeviceSynchronize());
        const auto begun = std::chrono::steady_clock::now();
        must(cudaMemcpy(to, from, size, kind));
        must(cudaDeviceSynchronize());
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
        least = took.count() < least ? took.count() : least;
    }
    printf("%s %.6f\n", name, least);
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: copy BYTES TIMES\n");
        return 2;
    }
    const size_t size = strtoull(argv[1], nullptr, 10);
    const int times = atoi(argv[2]);
    void * device;
    void * pinned;
    must(cudaMalloc(&device, size));
    must(cudaMallocHost(&pinned, size));
    void * pageable = malloc(size);
    memset(pageable, 1, size);
    memset(pinned, 1, size);
    measure("copy to the card, pageable memory", device, pageable, size, times, cudaMemcpyHostToDevice);
    measure("copy to the card, pinned memory", device, pinned, size, times, cudaMemcpyHostToDevice);
    measure("copy from the card, pageable memory", pageable, device, size, times, cudaMemcpyDeviceToHost);
    measure("copy from the card, pinned memory", pinned, device, size, times, cudaMemcpyDeviceToHost);
    return 0;
}
