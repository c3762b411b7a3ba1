// The wording of errors: what failed, every number that decided it, and what to do.
#include "base/error.h"

#include <gtest/gtest.h>

#include "base/bytes.h"

namespace trainstream {
namespace {

void expect_words(const std::string& text, const std::vector<std::string>& words) {
    EXPECT_EQ(text.find("trainstream: "), 0u) << text;
    for (const std::string& word : words) {
        EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
    }
}

// Goal: the numbers that decided are all there. Method: a different one for each.
TEST(ErrorTest, OutOfMemoryNamesEveryNumberAndWhatToDo) {
    const Error error = errors::out_of_memory({.asked_bytes = 3 * kGiB,
                                               .budget_bytes = 8 * kGiB,
                                               .in_use_bytes = 7 * kGiB,
                                               .pinned_bytes = 5 * kGiB,
                                               .host_limit_bytes = 16 * kGiB,
                                               .host_in_use_bytes = 15 * kGiB});
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    expect_words(error.what(), {"3.00 GiB", "budget 8.00 GiB", "in use 7.00 GiB", "5.00 GiB",
                                "2.00 GiB can move", "limit 16.00 GiB", "in use 15.00 GiB",
                                "Raise vram or ram in PYTORCH_TRAINSTREAM_CONF"});
}

TEST(ErrorTest, DoesNotFitNamesEveryTermAndWhatToDo) {
    FitNumbers numbers = {3 * kGiB, 2 * kGiB, kGiB, 20 * kGiB, 4 * kGiB, 20 * kGiB};
    const Error error = errors::does_not_fit(numbers);
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    expect_words(error.what(),
                 {"must hold 6.00 GiB at once", "3.00 GiB outside the blocks",
                  "2.00 GiB in blocks that stay", "1.00 GiB in flight", "budget is 4.00 GiB",
                  "20.00 GiB in paged blocks", "limit is 20.00 GiB",
                  "Raise vram or ram by at least 2.00 GiB", "check_memory=False"});

    numbers.host_budget_bytes = 15 * kGiB;
    expect_words(errors::does_not_fit(numbers).what(),
                 {"Raise vram by at least 2.00 GiB and ram by 5.00 GiB"});
    numbers.device_budget_bytes = 8 * kGiB;
    expect_words(errors::does_not_fit(numbers).what(), {"Raise ram by at least 5.00 GiB"});
}

TEST(ErrorTest, CopyFailedNamesSizeDirectionAndReason) {
    const Error error = errors::copy_failed("to host memory", 64 * kMiB, "the link is down");
    EXPECT_EQ(error.kind(), ErrorKind::kCopyFailed);
    expect_words(error.what(), {"64.00 MiB to host memory failed: the link is down"});
}

TEST(ErrorTest, DeviceErrorNamesTheCallAndTheReason) {
    const Error error = errors::device("cudaMalloc", "out of memory");
    EXPECT_EQ(error.kind(), ErrorKind::kDevice);
    expect_words(error.what(), {"cudaMalloc failed: out of memory."});
}

TEST(ErrorTest, InvalidArgumentIsSaidAsGiven) {
    const Error error = errors::invalid_argument("vram: 'lots' is no size.");
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_STREQ(error.what(), "trainstream: vram: 'lots' is no size.");
}

TEST(ErrorTest, HostRangeRefusedIsAboutMemoryAndSaysWhatToChange) {
    const Error error = errors::host_range_refused(90 * kGiB, "Cannot allocate memory");
    EXPECT_EQ(error.kind(), ErrorKind::kOutOfMemory);
    expect_words(error.what(), {"90.00 GiB", "Cannot allocate memory", "ulimit -v", "lower ram"});
}

TEST(ErrorTest, PinRefusedNamesWhatIsLockedAndWhatFollows) {
    expect_words(errors::pin_refused(256 * kMiB, 6 * kGiB, "Operation not permitted"),
                 {"256.00 MiB was refused with 6.00 GiB locked so far", "Operation not permitted",
                  "pageable memory", "ulimit -l"});
}

}  // namespace
}  // namespace trainstream
