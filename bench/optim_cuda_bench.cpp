// bench/optim_cuda_bench.cpp: optimizer steps by the GPU against what the link to the host allows.
//
//   optim_cuda_bench [--params=268435533] [--repeats=4] [--json=PATH]
//
// State in page-locked host memory, gradients and bf16 weights on the device. The ceiling is
// measured first, by copies both ways at once; a step moves as many bytes in as out. Every form is
// checked against the host kernel, on the first, middle and last tiles, by its first step. No
// Google Benchmark: a step of the default size takes 60 ms, and each form runs a few.
#include <sys/mman.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "device/cuda_context.h"
#include "device/cuda_device.h"
#include "optim/checksum.h"
#include "optim/number_formats.h"
#include "optim/square_sums_cuda.h"
#include "optim/staged_update.h"
#include "optim/update.h"
#include "optim/update_cuda.h"

namespace trainstream::optim {
namespace {

using Format = NumberFormat;

constexpr size_t kPeriod = size_t{1} << 20;  // The state repeats a pattern of so many elements.
constexpr size_t kSampleTiles = 16;

struct Options {
    size_t params = (size_t{1} << 28) + 77;  // The last tile is not whole.
    int repeats = 4;
    std::string json;
};

/// What is printed and written: the rows of bench/results.py.
class Rows {
public:
    void add(const std::string& name, double value, const char* unit) {
        std::printf("%-64s %10.4f %s\n", name.c_str(), value, unit);
        std::fflush(stdout);
        rows_ += (rows_.empty() ? "" : ",\n") + std::string("  {\"name\": \"") + name +
                 "\", \"value\": " + std::to_string(value) + ", \"unit\": \"" + unit + "\"}";
    }
    void write(const std::string& path, const std::string& hardware) const {
        std::FILE* const file = std::fopen(path.c_str(), "w");
        if (file == nullptr) {
            throw errors::invalid_argument("cannot write " + path);
        }
        std::fprintf(
            file,
            "{\n \"what\": \"optim-cuda\",\n \"hardware\": \"%s\",\n \"rows\": [\n%s\n ]\n}\n",
            hardware.c_str(), rows_.c_str());
        std::fclose(file);
    }

private:
    std::string rows_;
};

/// Calls work(begin, end) for parts of [0, items) on every core.
void on_all_cores(size_t items, const std::function<void(size_t, size_t)>& work) {
    const size_t count = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < count; ++i) {
        threads.emplace_back(work, items * i / count, items * (i + 1) / count);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

/// Page-locked huge pages, as the host pool makes them.
class HostArray {
public:
    explicit HostArray(size_t size_bytes) : size_bytes_(align_up(size_bytes, 2 * kMiB)) {
        bytes_ =
            mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (bytes_ == MAP_FAILED) {
            throw std::bad_alloc();
        }
        madvise(bytes_, size_bytes_, MADV_HUGEPAGE);
        on_all_cores(size_bytes_ / kMiB, [this](size_t begin, size_t end) {
            std::memset(as<char>() + begin * kMiB, 0, (end - begin) * kMiB);
        });
        check_cuda("cudaHostRegister",
                   cudaHostRegister(bytes_, size_bytes_, cudaHostRegisterDefault));
    }
    ~HostArray() {
        cudaHostUnregister(bytes_);
        munmap(bytes_, size_bytes_);
    }
    HostArray(const HostArray&) = delete;
    HostArray& operator=(const HostArray&) = delete;

    template <typename T>
    T* as() const {
        return static_cast<T*>(bytes_);
    }

private:
    size_t size_bytes_;
    void* bytes_ = nullptr;
};

class DeviceArray {
public:
    explicit DeviceArray(size_t size_bytes) {
        check_cuda("cudaMalloc", cudaMalloc(&bytes_, size_bytes));
    }
    ~DeviceArray() { cudaFree(bytes_); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    template <typename T>
    T* as() const {
        return static_cast<T*>(bytes_);
    }

private:
    void* bytes_ = nullptr;
};

class Stream {
public:
    Stream() { check_cuda("stream", cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(handle_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    cudaStream_t handle() const { return handle_; }
    void wait() const { check_cuda("cudaStreamSynchronize", cudaStreamSynchronize(handle_)); }

private:
    cudaStream_t handle_ = nullptr;
};

double seconds_of(const std::function<void()>& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Memory for the largest case, used by all of them in turn.
struct Memory {
    explicit Memory(size_t count)
        : weight(count * 4),
          remainder(count * 2),
          exp_avg(count * 4),
          exp_avg_sq(count * 4),
          checksums(tile_count(count) * 4),
          device_weight(count * 4),
          device_grad(count * 4) {}

    HostArray weight;
    HostArray remainder;
    HostArray exp_avg;
    HostArray exp_avg_sq;
    HostArray checksums;
    DeviceArray device_weight;
    DeviceArray device_grad;
};

/// What crosses the link lies on the host: both moments and the remainder, or the fp32 weight.
struct Case {
    const char* name;
    Formats formats;

    bool has_host_weight() const { return formats.param == Format::kFloat32; }
    /// Each way, for an element.
    size_t link_bytes() const {
        return (has_host_weight() ? 4 : 2) + 2 * bytes_of(formats.moments);
    }
};

const std::array<Case, 3> kCases = {{
    {"bf16 weights+remainders, bf16 grads, fp32 moments",
     {Format::kBfloat16, Format::kBfloat16, Format::kFloat32}},
    {"bf16 weights+remainders, bf16 grads, bf16 moments",
     {Format::kBfloat16, Format::kBfloat16, Format::kBfloat16}},
    {"fp32 weights, fp32 grads, fp32 moments, mirror on the device",
     {Format::kFloat32, Format::kFloat32, Format::kFloat32}},
}};

Slice slice_in(const Memory& memory, const Case& which, size_t count) {
    Slice slice;
    slice.count = count;
    slice.grad = memory.device_grad.as<void>();
    slice.exp_avg = memory.exp_avg.as<void>();
    slice.exp_avg_sq = memory.exp_avg_sq.as<void>();
    if (which.has_host_weight()) {
        slice.weight = memory.weight.as<void>();
        slice.weight_mirror = memory.device_weight.as<void>();
    } else {
        slice.weight = memory.device_weight.as<void>();
        slice.remainder = memory.remainder.as<int16_t>();
        slice.checksums = memory.checksums.as<uint32_t>();
    }
    return slice;
}

/// kPeriod numbers of either sign around `size`.
std::vector<char> pattern(Format format, float size, bool positive, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<char> bytes(kPeriod * bytes_of(format));
    for (size_t i = 0; i < kPeriod; ++i) {
        const float x = size * normal(random);
        const uint32_t bits = bits_of_float(positive ? std::abs(x) : x);
        const uint32_t stored = format == Format::kFloat32 ? bits : bits >> 16;
        std::memcpy(bytes.data() + i * bytes_of(format), &stored, bytes_of(format));
    }
    return bytes;
}

/// Repeats a pattern over `size_bytes`, on the host or the device.
void repeat(const std::vector<char>& bytes, void* to, size_t size_bytes, bool on_device) {
    const auto copy = [&](size_t begin, size_t end) {
        for (size_t piece = begin; piece < end; ++piece) {
            const size_t at = piece * bytes.size();
            char* const target = static_cast<char*>(to) + at;
            const size_t part = std::min(bytes.size(), size_bytes - at);
            if (on_device) {
                check_cuda("cudaMemcpy",
                           cudaMemcpy(target, bytes.data(), part, cudaMemcpyHostToDevice));
            } else {
                std::memcpy(target, bytes.data(), part);
            }
        }
    };
    const size_t pieces = (size_bytes + bytes.size() - 1) / bytes.size();
    if (on_device) {
        copy(0, pieces);
    } else {
        on_all_cores(pieces, copy);
    }
}

void fill(const Memory& memory, const Case& which, const Slice& slice) {
    const size_t count = slice.count;
    const Formats formats = which.formats;
    const size_t moment_bytes = count * bytes_of(formats.moments);
    repeat(pattern(formats.grad, 1e-3F, false, 1), memory.device_grad.as<void>(),
           count * bytes_of(formats.grad), true);
    const std::vector<char> weights = pattern(formats.param, 0.05F, false, 2);
    repeat(weights, slice.weight, count * bytes_of(formats.param), !which.has_host_weight());
    repeat(pattern(formats.moments, 1e-3F, false, 3), slice.exp_avg, moment_bytes, false);
    repeat(pattern(formats.moments, 1e-6F, true, 4), slice.exp_avg_sq, moment_bytes, false);
    if (formats.param != Format::kBfloat16) {
        return;
    }
    repeat(pattern(Format::kBfloat16, 1e3F, false, 5), slice.remainder, count * 2, false);
    on_all_cores(tile_count(count), [&](size_t begin, size_t end) {
        for (size_t tile = begin; tile < end; ++tile) {
            const auto* from = reinterpret_cast<const uint16_t*>(weights.data());
            slice.checksums[tile] =
                checksum(from + tile * kTile % kPeriod, std::min(kTile, count - tile * kTile));
        }
    });
}

/// A copy of some tiles, to step on the host and compare.
class Sample {
public:
    Sample(Formats formats, const Slice& part) : formats_(formats), slice_(part) {
        take(&slice_.grad, bytes_of(formats.grad) * part.count);
        take(&slice_.weight, bytes_of(formats.param) * part.count);
        take(&slice_.exp_avg, bytes_of(formats.moments) * part.count);
        take(&slice_.exp_avg_sq, bytes_of(formats.moments) * part.count);
        take(&slice_.remainder, sizeof(int16_t) * part.count);
        take(&slice_.checksums, sizeof(uint32_t) * tile_count(part.count));
        slice_.weight_mirror = nullptr;
    }
    Sample(const Sample&) = delete;
    Sample& operator=(const Sample&) = delete;

    void step(const AdamW::Scalars& scalars, RoundingKey key) {
        update(best_instruction_set(), formats_, slice_, scalars, key);
    }
    bool operator==(const Sample& other) const { return copies_ == other.copies_; }

private:
    template <typename T>
    void take(T** stream, size_t size_bytes) {
        std::vector<char>& copy = copies_.at(next_++);
        if (*stream == nullptr) {
            return;
        }
        copy.resize(size_bytes);
        check_cuda("cudaMemcpy", cudaMemcpy(copy.data(), *stream, size_bytes, cudaMemcpyDefault));
        *stream = reinterpret_cast<T*>(copy.data());
    }

    Formats formats_;
    Slice slice_;
    size_t next_ = 0;
    std::array<std::vector<char>, 6> copies_;
};

using Update = std::function<void(Formats, const Slice&, const AdamW::Scalars&, RoundingKey)>;

/// Steps once and compares some tiles with the host's.
bool agrees_with_host(const Case& which, const Slice& slice, const Update& update_all,
                      const Stream& stream) {
    const size_t tiles = tile_count(slice.count);
    const auto scalars = AdamW::scalars({}, 10, 1.0);
    const RoundingKey key = rounding_key(1, 2, 3);
    std::vector<std::unique_ptr<Sample>> samples;
    const std::array<size_t, 3> starts = {0, tiles / 2, tiles - std::min(tiles, kSampleTiles)};
    const auto part_at = [&](size_t tile) {
        return part_of(which.formats, slice, tile, kSampleTiles);
    };
    for (const size_t tile : starts) {
        samples.push_back(std::make_unique<Sample>(which.formats, part_at(tile)));
        samples.back()->step(scalars, key);
    }
    update_all(which.formats, slice, scalars, key);
    stream.wait();
    for (size_t i = 0; i < starts.size(); ++i) {
        if (!(Sample(which.formats, part_at(starts.at(i))) == *samples.at(i))) {
            return false;
        }
    }
    return true;
}

/// The link's rates in bytes a second, by copies of large blocks.
struct Link {
    double to_device = 0;
    double to_host = 0;
    double each_way = 0;  // Both ways at once.
};

Link measure_link(const Memory& memory, size_t count) {
    constexpr int kRounds = 4;
    const size_t bytes = std::min(count * 4, 512 * kMiB);
    const Stream in;
    const Stream out;
    const auto enqueue = [&](bool to_device) {
        for (int i = 0; i < kRounds; ++i) {
            if (to_device) {
                check_cuda("cudaMemcpyAsync",
                           cudaMemcpyAsync(memory.device_grad.as<void>(), memory.exp_avg.as<void>(),
                                           bytes, cudaMemcpyHostToDevice, in.handle()));
            } else {
                check_cuda(
                    "cudaMemcpyAsync",
                    cudaMemcpyAsync(memory.weight.as<void>(), memory.device_weight.as<void>(),
                                    bytes, cudaMemcpyDeviceToHost, out.handle()));
            }
        }
    };
    const auto rate = [&](bool to_device, bool to_host) {
        const double seconds = seconds_of([&] {
            if (to_device) {
                enqueue(true);
            }
            if (to_host) {
                enqueue(false);
            }
            in.wait();
            out.wait();
        });
        return kRounds * static_cast<double>(bytes) / seconds;
    };
    static_cast<void>(rate(true, true));  // The first copies are slower.
    return {rate(true, false), rate(false, true), rate(true, true)};
}

/// One way to do a step.
struct Form {
    std::string name;
    Update update;
};

class Bench {
public:
    explicit Bench(const Options& options)
        : options_(options), memory_(options.params), link_(measure_link(memory_, options.params)) {
        rows_.add("link: to the device alone", link_.to_device / 1e9, "GB/s");
        rows_.add("link: to the host alone", link_.to_host / 1e9, "GB/s");
        rows_.add("link: each way, both at once", link_.each_way / 1e9, "GB/s");
    }

    void run() {
        // Bulk copies last: they are the least known, and a fault ends everything.
        for (const Case& which : kCases) {
            measure_all(which, direct_forms());
            measure_all(which, copy_forms());
            if (which.formats.param == Format::kBfloat16 &&
                which.formats.moments == Format::kFloat32) {
                measure_reads(which);
            }
        }
        for (const Case& which : kCases) {
            measure_all(which, bulk_forms());
        }
    }
    const Rows& rows() const { return rows_; }
    bool has_failed() const { return has_failed_; }

private:
    Form kernel_form(const char* name, CudaForm form, unsigned blocks) const {
        return {name + std::to_string(blocks) + " blocks",
                [this, form, blocks](Formats formats, const Slice& slice,
                                     const AdamW::Scalars& scalars, RoundingKey key) {
                    update_cuda(formats, slice, scalars, key, stream_.handle(), {form, blocks});
                }};
    }
    std::vector<Form> kernel_forms(const char* name, CudaForm form) const {
        std::vector<Form> forms;
        for (const unsigned blocks : {16U, 32U, 64U, 132U}) {
            forms.push_back(kernel_form(name, form, blocks));
        }
        return forms;
    }
    std::vector<Form> direct_forms() const { return kernel_forms("direct, ", CudaForm::kDirect); }
    std::vector<Form> bulk_forms() const { return kernel_forms("bulk, ", CudaForm::kBulk); }

    std::vector<Form> copy_forms() const {
        std::vector<Form> forms;
        for (const size_t mib : {2, 4, 8, 16, 32}) {
            StagedUpdateOptions staged_options;
            staged_options.chunk_bytes = mib * kMiB;
            const auto staged = std::make_shared<StagedUpdate>(staged_options);
            forms.push_back({"copy engines, chunks of " + format_bytes(mib * kMiB),
                             [this, staged](Formats formats, const Slice& slice,
                                            const AdamW::Scalars& scalars, RoundingKey key) {
                                 staged->update(formats, slice, scalars, key, stream_.handle());
                             }});
        }
        return forms;
    }

    void measure_all(const Case& which, const std::vector<Form>& forms) {
        const Slice slice = slice_in(memory_, which, options_.params);
        fill(memory_, which, slice);
        for (const Form& form : forms) {
            const std::string name = std::string(which.name) + ": " + form.name;
            try {
                measure(which, slice, form, name);
            } catch (const Error& error) {
                fail(name, error.what());
            }
        }
    }

    void measure(const Case& which, const Slice& slice, const Form& form, const std::string& name) {
        if (!agrees_with_host(which, slice, form.update, stream_)) {
            return fail(name, "its bits differ from the host's");
        }
        double enqueue_seconds = 0;
        const double all_seconds = seconds_of([&] {
            enqueue_seconds = seconds_of([&] {
                for (int i = 0; i < options_.repeats; ++i) {
                    form.update(which.formats, slice, AdamW::scalars({}, 11 + i, 1.0), {});
                }
            });
            stream_.wait();
        });
        const double seconds = all_seconds / options_.repeats;
        const auto params = static_cast<double>(slice.count);
        const double each_way = params * static_cast<double>(which.link_bytes()) / seconds;
        rows_.add(name, seconds / params * 1e9, "ns/param");
        rows_.add(name + ": each way", each_way / 1e9, "GB/s");
        rows_.add(name + ": share of both ways", each_way / link_.each_way, "ratio");
        rows_.add(name + ": host's time to enqueue",
                  enqueue_seconds / options_.repeats / params * 1e9, "ns/param");
    }

    /// What only reads device memory: the gradient's norm, and a look for changed weights.
    void measure_reads(const Case& which) {
        const Slice slice = slice_in(memory_, which, options_.params);
        const size_t tiles = tile_count(slice.count);
        const DeviceArray sums((tiles + 1) * sizeof(double));
        const auto bytes = static_cast<double>(slice.count) * 2;
        const auto add = [&](const char* name, const std::function<void()>& work) {
            work();
            stream_.wait();
            const double seconds = seconds_of([&] {
                for (int i = 0; i < options_.repeats; ++i) {
                    work();
                }
                stream_.wait();
            });
            rows_.add(name, bytes * options_.repeats / seconds / 1e9, "GB/s");
        };
        add("squares of bf16 gradients", [&] {
            tile_square_sums_cuda(Format::kBfloat16, slice.grad, slice.count, sums.as<double>(),
                                  stream_.handle());
        });
        add("sums of their tiles in order (bytes of the gradients)", [&] {
            add_in_order_cuda(sums.as<double>(), tiles, sums.as<double>() + tiles,
                              stream_.handle());
        });
    }

    void fail(const std::string& name, const std::string& reason) {
        std::printf("%s: FAILED: %s\n", name.c_str(), reason.c_str());
        has_failed_ = true;
    }

    const Options options_;
    const Memory memory_;
    const Stream stream_;
    Rows rows_;
    Link link_;
    bool has_failed_ = false;
};

/// The text after `--name=` of an argument that begins so; null otherwise.
const char* value_of(const char* argument, const char* name) {
    const size_t length = std::strlen(name);
    return std::strncmp(argument, name, length) == 0 ? argument + length : nullptr;
}

Options parse(int count, char** arguments) {
    Options options;
    for (int i = 1; i < count; ++i) {
        if (const char* params = value_of(arguments[i], "--params=")) {
            options.params = std::strtoull(params, nullptr, 10);
        } else if (const char* repeats = value_of(arguments[i], "--repeats=")) {
            options.repeats = std::atoi(repeats);
        } else if (const char* json = value_of(arguments[i], "--json=")) {
            options.json = json;
        } else {
            throw errors::invalid_argument(std::string("unknown argument ") + arguments[i]);
        }
    }
    if (options.params == 0 || options.repeats < 1) {
        throw errors::invalid_argument("--params and --repeats must be at least 1");
    }
    return options;
}

int run(const Options& options) {
    std::string reason;
    if (CudaDevice::count(&reason) == 0) {
        std::printf("skipped: %s\n", reason.c_str());
        return 0;
    }
    cudaDeviceProp properties = {};
    check_cuda("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, 0));
    std::printf("%s, %zu parameters, %d steps a form\n", properties.name, options.params,
                options.repeats);
    Bench bench(options);
    bench.run();
    if (!options.json.empty()) {
        bench.rows().write(options.json, properties.name);
    }
    return bench.has_failed() ? 1 : 0;
}

}  // namespace
}  // namespace trainstream::optim

int main(int argc, char** argv) {
    try {
        return trainstream::optim::run(trainstream::optim::parse(argc, argv));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "optim_cuda_bench: %s\n", error.what());
        return 1;
    }
}
