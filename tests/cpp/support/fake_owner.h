// tests/cpp/support/fake_owner.h: owners of bytes that live and die like torch's StorageImpl.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "base/mutex.h"
#include "pager/owner_port.h"
#include "pager/pager.h"

namespace trainstream::testing {

/// Who points to a storage's bytes: strong references keep the bytes, weak ones the struct.
///
/// Lock: none on `address`, as in torch. Operators read it while they have it pinned, the pager
/// writes it while nobody has; so ThreadSanitizer sees each move that an operator can see.
struct FakeOwner {
    void* address = nullptr;
    size_t size_bytes = 0;
    std::atomic<int> strong{1};
    std::atomic<int> weak{1};  // One for all strong references together.

    unsigned char* bytes() const { return static_cast<unsigned char*>(address); }
};

/// OwnerPort over FakeOwners. Checks which calls come with the pager's lock held, and counts.
class FakeOwnerPort final : public OwnerPort {
public:
    /// Where dropped bytes go. Before the first owner is made.
    void attach(Pager& pager) { pager_ = &pager; }

    FakeOwner* adopt(void* address, size_t size_bytes) {
        auto* owner = new FakeOwner;
        owner->address = address;
        owner->size_bytes = size_bytes;
        owners_.fetch_add(1);
        return owner;
    }

    /// Lets go of one strong reference; the last one frees the bytes.
    void drop(FakeOwner* owner) noexcept {
        if (owner->strong.fetch_sub(1) == 1) {
            if (void* address = std::exchange(owner->address, nullptr)) {
                EXPECT_TRUE(pager_->free(address));
            }
            drop_weak(owner);
        }
    }

    void* address_of(const void* owner) const override {
        expect_locked();
        return static_cast<const FakeOwner*>(owner)->address;
    }
    size_t holders(const void* owner) const override {
        expect_locked();
        return static_cast<size_t>(static_cast<const FakeOwner*>(owner)->strong.load());
    }
    void remember(void* owner) override {
        expect_locked();
        static_cast<FakeOwner*>(owner)->weak.fetch_add(1);
        remembered_.fetch_add(1);
    }
    void forget(void* owner) noexcept override {
        EXPECT_TRUE(holds_no_lock());
        remembered_.fetch_sub(1);
        drop_weak(static_cast<FakeOwner*>(owner));
    }
    bool hold(void* owner) override {
        EXPECT_TRUE(holds_no_lock());
        auto* fake = static_cast<FakeOwner*>(owner);
        call(before_hold, *fake);
        int count = fake->strong.load();
        while (count > 0 && !fake->strong.compare_exchange_weak(count, count + 1)) {
        }
        if (count == 0) {
            return false;
        }
        held_.fetch_add(1);
        call(after_hold, *fake);
        return true;
    }
    void release(void* owner) noexcept override {
        EXPECT_TRUE(holds_no_lock());
        held_.fetch_sub(1);
        drop(static_cast<FakeOwner*>(owner));
        if (const std::function<void()> copy = after_release) {
            copy();
        }
    }
    bool repoint(void* owner, void* from, void* to) override {
        expect_locked();
        auto* fake = static_cast<FakeOwner*>(owner);
        if (fake->address != from) {
            return false;
        }
        fake->address = to;
        return true;
    }
    void* begin_blocking() override {
        EXPECT_TRUE(holds_no_lock());
        blocked_.fetch_add(1);
        return this;
    }
    void end_blocking(void* token) override {
        EXPECT_TRUE(holds_no_lock());
        EXPECT_EQ(token, this);
        blocked_.fetch_sub(1);
    }
    void watch(bool on) override {
        EXPECT_TRUE(holds_no_lock());
        watchers_.fetch_add(on ? 1 : -1);
    }

    bool all_announced() const override { return announced.load(); }
    bool all_kernels_known() const override { return kernels_known; }
    size_t user_threads() const override { return threads; }
    std::atomic<size_t> threads{1};  // What the pager is told of them.
    std::atomic<bool> announced{true};
    std::atomic<bool> kernels_known{true};

    /// How often watch(true) came more than watch(false); a pager starts with one.
    int watchers() const { return watchers_.load(); }
    int held() const { return held_.load(); }
    int remembered() const { return remembered_.load(); }
    int blocked() const { return blocked_.load(); }
    /// FakeOwners that exist.
    int owners() const { return owners_.load(); }

    /// Run by hold(), on the thread that evicts: before it looks, and once the bytes are held. They
    /// may replace themselves.
    std::function<void(FakeOwner&)> before_hold;
    std::function<void(FakeOwner&)> after_hold;
    /// Run by release(): what letting go of bytes may run, such as a finalizer in Python.
    std::function<void()> after_release;

private:
    static void call(const std::function<void(FakeOwner&)>& hook, FakeOwner& owner) {
        if (const std::function<void(FakeOwner&)> copy = hook) {
            copy(owner);
        }
    }

    static void expect_locked() {
#ifdef TS_DEBUG_CHECKS
        EXPECT_FALSE(holds_no_lock());
#endif
    }

    void drop_weak(FakeOwner* owner) noexcept {
        if (owner->weak.fetch_sub(1) == 1) {
            delete owner;
            owners_.fetch_sub(1);
        }
    }

    Pager* pager_ = nullptr;
    std::atomic<int> watchers_{1};
    std::atomic<int> held_{0};
    std::atomic<int> remembered_{0};
    std::atomic<int> blocked_{0};
    std::atomic<int> owners_{0};
};

}  // namespace trainstream::testing
