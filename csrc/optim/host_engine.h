// csrc/optim/host_engine.h: updates whole parameters on the host's cores.
#pragma once

#include <cstddef>
#include <span>

#include "optim/adamw.h"
#include "optim/rounding.h"
#include "optim/slice.h"
#include "optim/update.h"
#include "optim/worker_threads.h"

namespace trainstream::optim {

/// One step of one slice.
struct SliceUpdate {
    Formats formats;
    Slice slice;
    AdamW::Scalars scalars;
    RoundingKey key;
};

/// Numbers whose squares are added.
struct Gradient {
    NumberFormat format = NumberFormat::kFloat32;
    const void* grad = nullptr;
    size_t count = 0;
};

struct HostEngineOptions {
    size_t threads = 0;  // 0: usable_cores().
    InstructionSet instruction_set = best_instruction_set();
};

/// Shares tiles among threads. Results do not depend on how many there are, nor on the order.
///
/// Any thread may call; two calls at once take turns. What the slices name must be on the host, and
/// nobody else may touch it until the call returns.
class HostEngine {
public:
    /// Throws kInvalidArgument for an instruction set that this machine lacks.
    explicit HostEngine(const HostEngineOptions& options = {});

    size_t threads() const { return threads_.count(); }
    InstructionSet instruction_set() const { return set_; }

    /// Requires: no element is in two slices.
    void update(std::span<const SliceUpdate> updates);

    /// Over all gradients, each tile by tile, in the order given; so a gradient that is cut at
    /// tiles' borders gives the same bits as a whole one. Not finite exactly if an element is not.
    double sum_of_squares(std::span<const Gradient> gradients);

private:
    const InstructionSet set_;
    WorkerThreads threads_;
};

}  // namespace trainstream::optim
