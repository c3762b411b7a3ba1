// tests/cpp/support/pager_world.h: a pager and all that it stands on, with owners to try it on.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/bytes.h"
#include "device/sim_device.h"
#include "device/sim_memory.h"
#include "pager/host_pool.h"
#include "pager/pager.h"
#include "support/fake_owner.h"
#include "support/flaky_device.h"
#include "support/flaky_memory.h"

namespace trainstream::testing {

using Bytes = std::vector<unsigned char>;

/// `size_bytes` bytes that differ from place to place and from mark to mark.
inline Bytes pattern(size_t size_bytes, unsigned mark) {
    Bytes bytes(size_bytes);
    for (size_t i = 0; i < size_bytes; ++i) {
        bytes[i] = static_cast<unsigned char>(i * 7 + (i >> 8) * 31 + mark * 101 + 1);
    }
    return bytes;
}

struct WorldOptions {
    uint64_t budget_bytes = 256 * kKiB;
    uint64_t host_bytes = 64 * kMiB;
    SimDeviceOptions device = {};
    SimFaults faults = {};
    PagerOptions pager = {};
};

/// Owner: the test. Everything is on the simulated device; the caller plays the operators.
struct PagerWorld {
    explicit PagerWorld(const WorldOptions& options = {})
        : device(options.device),
          door(device),
          memory({options.budget_bytes}),
          memory_door(memory),
          host(door, {.limit_bytes = options.host_bytes, .grow_in_background = false}),
          pager(door, memory_door, host, port, options.pager) {
        device.set_faults(options.faults);
        port.attach(pager);
    }

    /// A storage that an operator made and filled with pattern(size_bytes, mark).
    FakeOwner* make(size_t size_bytes, unsigned mark, StreamId stream = 0) {
        FakeOwner* owner = make_unknown(size_bytes, mark, stream);
        pager.note_outputs({owner}, stream, nullptr);
        return owner;
    }
    /// The same before its operator has ended: the pager does not know the owner yet.
    FakeOwner* make_unknown(size_t size_bytes, unsigned mark, StreamId stream = 0) {
        Pins none;
        pager.begin_use({}, stream, &none);  // So that storages made later are hotter.
        FakeOwner* owner = port.adopt(pager.allocate(size_bytes, stream), size_bytes);
        fill(owner, mark);
        return owner;
    }
    static void fill(FakeOwner* owner, unsigned mark) {
        const Bytes bytes = pattern(owner->size_bytes, mark);
        std::memcpy(owner->address, bytes.data(), bytes.size());
    }
    static bool has(const FakeOwner* owner, unsigned mark) {
        const Bytes bytes = pattern(owner->size_bytes, mark);
        return std::memcmp(owner->address, bytes.data(), bytes.size()) == 0;
    }

    /// An operator without a body.
    void use(FakeOwner* owner, UseKind kind, bool writes = false, StreamId stream = 0) {
        Pins pins;
        pager.begin_use({{owner, writes, kind}}, stream, &pins);
        pager.end_use(&pins);
    }
    /// An operator that fills the storage.
    void write(FakeOwner* owner, unsigned mark, UseKind kind = UseKind::kInPlace,
               StreamId stream = 0) {
        Pins pins;
        pager.begin_use({{owner, /*writes=*/true, kind}}, stream, &pins);
        fill(owner, mark);
        pager.end_use(&pins);
    }
    /// An operator that compares the storage's bytes with pattern(..., mark).
    bool reads(FakeOwner* owner, unsigned mark, UseKind kind = UseKind::kInPlace,
               StreamId stream = 0) {
        Pins pins;
        pager.begin_use({{owner, /*writes=*/false, kind}}, stream, &pins);
        const bool same = has(owner, mark);
        pager.end_use(&pins);
        return same;
    }

    Residency residency(const FakeOwner* owner) const {
        Residency residency = Residency::kResident;
        EXPECT_TRUE(pager.residency(owner->address, &residency));
        return residency;
    }
    bool is_cold(const FakeOwner* owner) const { return residency(owner) == Residency::kCold; }
    bool is_resident(const FakeOwner* owner) const {
        return residency(owner) == Residency::kResident;
    }

    /// Nothing is left of any storage. Called once all owners were dropped.
    void expect_nothing_left() {
        pager.boundary();  // A plan about storages that are no more gives its memory back.
        const PagerStats stats = pager.stats();
        EXPECT_EQ(memory.used_bytes(), 0u);
        EXPECT_EQ(host.stats().in_use_bytes, 0u);
        EXPECT_EQ(stats.resident_bytes, 0u);
        EXPECT_EQ(stats.cold_bytes, 0u);
        EXPECT_EQ(stats.pinned_storages, 0u);
        EXPECT_EQ(port.held(), 0);
        EXPECT_EQ(port.remembered(), 0);
        EXPECT_EQ(port.blocked(), 0);
        EXPECT_EQ(port.owners(), 0);
    }

    SimDevice device;
    FlakyDevice door;  // To the device, for the pager and its pool.
    SimMemory memory;
    FlakyMemory memory_door;  // Likewise.
    HostPool host;
    FakeOwnerPort port;
    Pager pager;
};

}  // namespace trainstream::testing
