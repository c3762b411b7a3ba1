// csrc/optim/update.h: one optimizer step of a slice, by the best instructions this machine has.
//
// Every instruction set gives the same bits, so the choice is one of speed alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/adamw.h"
#include "optim/rounding.h"
#include "optim/slice.h"

namespace trainstream::optim {

enum class InstructionSet : uint8_t { kScalar, kAvx2, kAvx512 };

const char* name_of(InstructionSet set);

/// Whether this machine and its operating system run it.
bool is_supported(InstructionSet set);
InstructionSet best_instruction_set();

constexpr size_t tile_count(size_t count) { return (count + kTile - 1) / kTile; }
constexpr size_t bytes_of(NumberFormat format) { return format == NumberFormat::kFloat32 ? 4 : 2; }

/// The part of `slice` that begins `tile` tiles in and has at most `tiles` tiles.
Slice part_of(Formats formats, const Slice& slice, size_t tile, size_t tiles);

/// Reads and writes only what the slice names, under the default floating-point environment
/// whatever the thread's is. Requires: `set` is supported, slice.first is a multiple of kTile.
void update(InstructionSet set, Formats formats, const Slice& slice, const AdamW::Scalars& scalars,
            RoundingKey key);

/// Writes the sum of the squares of each tile of `grad`: in double, element i of a tile to sum i %
/// 16 in order, then the 16 as a tree. A sum is not finite exactly if an element of its tile is
/// not: 2048 squares of at most 2^256 are far from double's 2^1024.
void tile_square_sums(InstructionSet set, NumberFormat format, const void* grad, size_t count,
                      double* tile_sums);

/// The sums of a gradient's tiles, added in their order.
double sum_in_order(const double* tile_sums, size_t tiles);

}  // namespace trainstream::optim
