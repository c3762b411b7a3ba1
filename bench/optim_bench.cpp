// bench/optim_bench.cpp: host optimizer steps against what host memory allows.
//
//   optim_bench [--mib=256] [--threads=0] [Google Benchmark's own flags]
//
// Every instruction set, every combination of formats, in L2 (1 MiB a thread) and in memory (--mib
// of state). Each first checks its bits against the scalar kernel. The ceiling beside it is
// measured just before, with the same threads and as many bytes: three arrays, each read, changed,
// written.
#include <sys/mman.h>
#include <benchmark/benchmark.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "optim/checksum.h"
#include "optim/host_engine.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trainstream::optim {
namespace {

using Format = NumberFormat;

constexpr size_t kL2BytesPerThread = kMiB;
constexpr size_t kCheckedCount = (size_t{1} << 18) + 77;
constexpr double kCeilingSeconds = 0.3;

/// Zeroed memory on huge pages where the system gives them.
class Array {
public:
    explicit Array(size_t size_bytes) : size_bytes_(align_up(size_bytes + 1, 2 * kMiB)) {
        bytes_ =
            mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bytes_ == MAP_FAILED) {
            throw std::bad_alloc();
        }
        madvise(bytes_, size_bytes_, MADV_HUGEPAGE);
    }
    ~Array() { munmap(bytes_, size_bytes_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    template <typename T>
    T* as() const {
        return static_cast<T*>(bytes_);
    }
    bool operator==(const Array& other) const {
        return std::memcmp(bytes_, other.bytes_, size_bytes_) == 0;
    }

private:
    size_t size_bytes_;
    void* bytes_;
};

/// One parameter. Read and written: weight with what its format keeps beside it, and two moments;
/// read: the gradient.
size_t bytes_per_param(Formats formats) {
    const size_t beside = formats.param == Format::kFloat32    ? 0
                          : formats.param == Format::kBfloat16 ? 2
                                                               : 4;
    return 2 * (bytes_of(formats.param) + beside + 2 * bytes_of(formats.moments)) +
           bytes_of(formats.grad);
}

class State {
public:
    State(Formats formats, size_t count)
        : formats_(formats),
          count_(count),
          grad_(count * bytes_of(formats.grad)),
          weight_(count * bytes_of(formats.param)),
          beside_(formats.param == Format::kFloat32 ? 0 : count * 4),
          exp_avg_(count * bytes_of(formats.moments)),
          exp_avg_sq_(count * bytes_of(formats.moments)),
          checksums_(tile_count(count)) {
        fill(grad_, formats.grad, 1e-3F);
        fill(weight_, formats.param, 0.05F);
        if (formats.param == Format::kBfloat16) {
            checksum_tiles(weight_.as<uint16_t>(), count, checksums_.data());
        }
    }

    SliceUpdate step(int64_t number) const {
        SliceUpdate one;
        one.formats = formats_;
        one.scalars = AdamW::scalars({}, number, 1.0);
        one.key = rounding_key(1, 2, static_cast<uint64_t>(number));
        one.slice.count = count_;
        one.slice.grad = grad_.as<void>();
        one.slice.weight = weight_.as<void>();
        one.slice.remainder = beside_.as<int16_t>();
        one.slice.master = beside_.as<float>();
        one.slice.checksums = const_cast<uint32_t*>(checksums_.data());
        one.slice.exp_avg = exp_avg_.as<void>();
        one.slice.exp_avg_sq = exp_avg_sq_.as<void>();
        return one;
    }

    bool operator==(const State& other) const {
        return weight_ == other.weight_ && beside_ == other.beside_ && exp_avg_ == other.exp_avg_ &&
               exp_avg_sq_ == other.exp_avg_sq_ && checksums_ == other.checksums_;
    }

private:
    /// Numbers of either sign around `size`, as any format's upper half has them.
    void fill(const Array& array, Format format, float size) const {
        std::minstd_rand random(1);
        for (size_t i = 0; i < count_; ++i) {
            const float sign = (random() & 64U) != 0 ? size : -size;
            const float value = sign * (0.5F + static_cast<float>(random() % 1024) / 1024);
            uint32_t bits = 0;
            std::memcpy(&bits, &value, sizeof bits);
            if (format == Format::kFloat32) {
                array.as<uint32_t>()[i] = bits;
            } else {  // fp16: exponent 15 - 10 = 2^-10 and the same sign, near enough.
                array.as<uint16_t>()[i] = static_cast<uint16_t>(
                    format == Format::kBfloat16
                        ? bits >> 16
                        : (bits >> 16 & 0x8000U) | (0x1400U + random() % 1024));
            }
        }
    }

    Formats formats_;
    size_t count_;
    Array grad_;
    Array weight_;
    Array beside_;
    Array exp_avg_;
    Array exp_avg_sq_;
    std::vector<uint32_t> checksums_;
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void add_avx512(float* x, size_t count) {
    for (size_t i = 0; i < count; i += 16) {
        _mm512_storeu_ps(x + i, _mm512_add_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(1e-9F)));
    }
}
__attribute__((target("avx2"))) void add_avx2(float* x, size_t count) {
    for (size_t i = 0; i < count; i += 8) {
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(1e-9F)));
    }
}
#endif

void add_constant(InstructionSet set, float* x, size_t count) {
#if defined(__x86_64__)
    if (set != InstructionSet::kScalar) {
        return set == InstructionSet::kAvx512 ? add_avx512(x, count) : add_avx2(x, count);
    }
#endif
    static_cast<void>(set);
    for (size_t i = 0; i < count; ++i) {
        x[i] += 1e-9F;
    }
}

/// Bytes a second of reading, changing and writing three arrays of `state_bytes` together.
double measure_ceiling(size_t state_bytes, size_t threads) {
    const size_t tiles = std::max(state_bytes / (3 * sizeof(float) * kTile), threads);
    const std::array<Array, 3> arrays = {Array(tiles * kTile * sizeof(float)),
                                         Array(tiles * kTile * sizeof(float)),
                                         Array(tiles * kTile * sizeof(float))};
    WorkerThreads workers(threads);
    const InstructionSet set = best_instruction_set();
    const auto pass = [&] {
        const size_t piece = std::clamp(tiles / (threads * 8), size_t{1}, size_t{32});
        workers.parallel_for(tiles, piece, [&](size_t begin, size_t end) noexcept {
            for (size_t tile = begin; tile < end; ++tile) {
                for (const Array& array : arrays) {
                    add_constant(set, array.as<float>() + tile * kTile, kTile);
                }
            }
        });
    };
    pass();  // Touches the memory.
    const auto start = std::chrono::steady_clock::now();
    double seconds = 0;
    double passes = 0;
    while (seconds < kCeilingSeconds) {
        pass();
        ++passes;
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        seconds = spent.count();
    }
    return passes * static_cast<double>(tiles * kTile * 6 * sizeof(float)) / seconds;
}

bool agrees_with_scalar(InstructionSet set, Formats formats, size_t threads) {
    const State expected(formats, kCheckedCount);
    const State state(formats, kCheckedCount);
    HostEngine scalar({.threads = 1, .instruction_set = InstructionSet::kScalar});
    HostEngine engine({.threads = threads, .instruction_set = set});
    for (int64_t number = 1; number <= 2; ++number) {
        const SliceUpdate first = expected.step(number);
        const SliceUpdate second = state.step(number);
        scalar.update({&first, 1});
        engine.update({&second, 1});
    }
    return state == expected;
}

/// Google Benchmark's counters per second cannot be shared by a ceiling, so the loop is timed here.
class Stopwatch {
public:
    void report(benchmark::State& bench, size_t count, size_t bytes_each, double ceiling) const {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
        const double params = static_cast<double>(bench.iterations()) * static_cast<double>(count);
        const double rate = params * static_cast<double>(bytes_each) / spent.count();
        bench.counters["ns/param"] = spent.count() * 1e9 / params;
        bench.counters["GB/s"] = rate / 1e9;
        bench.counters["ceiling_GB/s"] = ceiling / 1e9;
        bench.counters["share"] = rate / ceiling;
    }

private:
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void update_benchmark(benchmark::State& bench, InstructionSet set, Formats formats,
                      size_t state_bytes, size_t threads) {
    if (!agrees_with_scalar(set, formats, threads)) {
        bench.SkipWithError("its bits differ from the scalar kernel's");
        return;
    }
    // A parameter's state is what its traffic touches; what is read and written counts once.
    const size_t touched = (bytes_per_param(formats) + bytes_of(formats.grad)) / 2;
    const size_t count = state_bytes / touched;
    const double ceiling = measure_ceiling(state_bytes, threads);
    const State state(formats, count);
    HostEngine engine({.threads = threads, .instruction_set = set});
    int64_t number = 1;
    const SliceUpdate touching = state.step(number);  // Memory that was never written is made now.
    engine.update({&touching, 1});
    const Stopwatch watch;
    for (auto _ : bench) {
        const SliceUpdate one = state.step(++number);
        engine.update({&one, 1});
    }
    watch.report(bench, count, bytes_per_param(formats), ceiling);
}

void squares_benchmark(benchmark::State& bench, InstructionSet set, Format format,
                       size_t state_bytes, size_t threads) {
    const size_t count = state_bytes / bytes_of(format);
    const State state({.grad = format}, count);
    const Gradient gradient = {format, state.step(1).slice.grad, count};
    HostEngine scalar({.threads = 1, .instruction_set = InstructionSet::kScalar});
    HostEngine engine({.threads = threads, .instruction_set = set});
    if (engine.sum_of_squares({&gradient, 1}) != scalar.sum_of_squares({&gradient, 1})) {
        bench.SkipWithError("its bits differ from the scalar kernel's");
        return;
    }
    const double ceiling = measure_ceiling(state_bytes, threads);
    const Stopwatch watch;
    for (auto _ : bench) {
        benchmark::DoNotOptimize(engine.sum_of_squares({&gradient, 1}));
    }
    watch.report(bench, count, bytes_of(format), ceiling);
}

const char* name_of(Format format) {
    return format == Format::kFloat32 ? "fp32" : format == Format::kBfloat16 ? "bf16" : "fp16";
}

template <typename Body>
void add_benchmark(const std::string& name, const Body& body) {
    benchmark::RegisterBenchmark(name.c_str(), body)->UseRealTime()->MinTime(0.3);
}

void add_benchmarks(size_t memory_bytes, size_t threads) {
    const std::array<Format, 3> formats = {Format::kFloat32, Format::kBfloat16, Format::kFloat16};
    for (const auto set :
         {InstructionSet::kAvx512, InstructionSet::kAvx2, InstructionSet::kScalar}) {
        if (!is_supported(set)) {
            std::printf("no %s here\n", optim::name_of(set));
            continue;
        }
        for (const bool in_l2 : {false, true}) {
            const size_t bytes = in_l2 ? threads * kL2BytesPerThread : memory_bytes;
            const std::string prefix =
                std::string(optim::name_of(set)) + (in_l2 ? "/L2/" : "/memory/");
            for (const Format param : formats) {
                for (const Format grad : formats) {
                    for (const Format moments : {Format::kFloat32, Format::kBfloat16}) {
                        const std::string name = prefix + "param:" + name_of(param) +
                                                 "/grad:" + name_of(grad) +
                                                 "/moments:" + name_of(moments);
                        const Formats all = {param, grad, moments};
                        add_benchmark("update/" + name, [=](benchmark::State& bench) {
                            update_benchmark(bench, set, all, bytes, threads);
                        });
                    }
                }
                add_benchmark("squares/" + prefix + "grad:" + name_of(param),
                              [=](benchmark::State& bench) {
                                  squares_benchmark(bench, set, param, bytes, threads);
                              });
            }
        }
    }
}

/// The number after `--name=` in the arguments, which is then taken out of them.
size_t take_number(int* count, char** arguments, const std::string& name, size_t otherwise) {
    for (int i = 1; i < *count; ++i) {
        if (std::strncmp(arguments[i], name.c_str(), name.size()) == 0) {
            otherwise = std::strtoull(arguments[i] + name.size(), nullptr, 10);
            std::copy(arguments + i + 1, arguments + *count, arguments + i);
            --*count;
        }
    }
    return otherwise;
}

}  // namespace
}  // namespace trainstream::optim

int main(int argc, char** argv) {
    using namespace trainstream;  // NOLINT(google-build-using-namespace): a main is short.
    const size_t memory_bytes = optim::take_number(&argc, argv, "--mib=", 256) * kMiB;
    const size_t asked_threads = optim::take_number(&argc, argv, "--threads=", 0);
    const size_t threads = optim::WorkerThreads(asked_threads).count();
    std::printf("threads: %zu, memory: %s\n", threads, format_bytes(memory_bytes).c_str());
    optim::add_benchmarks(memory_bytes, threads);
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 1;
    }
    benchmark::RunSpecifiedBenchmarks();
    return 0;
}
