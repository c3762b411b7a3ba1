#include "pager/host_chunks.h"

#include <gtest/gtest.h>

namespace trainstream {
namespace {

/// Neighbours of 100 bytes each, from 1000 on.
HostChunks three_locked_chunks() {
    HostChunks chunks;
    for (uintptr_t begin = 1000; begin < 1300; begin += 100) {
        chunks.add({begin, 100, /*locked=*/true});
    }
    return chunks;
}

// Goal: an extent stays inside its chunk. Method: free neighbours, and more than one of them holds.
TEST(HostChunksTest, FreeNeighbourChunksStayApart) {
    HostChunks chunks = three_locked_chunks();
    EXPECT_FALSE(chunks.take(101).has_value());
    EXPECT_EQ(chunks.take(100)->begin, 1000u);
    chunks.give(1000, 100);
    EXPECT_FALSE(chunks.take(101).has_value());
    EXPECT_EQ(chunks.locked_bytes(), 300u);
}

TEST(HostChunksTest, LockedMemoryIsTakenBeforePageable) {
    HostChunks chunks;
    chunks.add({500, 10, /*locked=*/false});
    chunks.add({1000, 100, /*locked=*/true});
    EXPECT_TRUE(chunks.take(10)->locked);
    EXPECT_TRUE(chunks.take(90)->locked);
    EXPECT_FALSE(chunks.take(10)->locked);
}

// Goal: pageable memory grows into one extent, and its end is known.
TEST(HostChunksTest, PageableNeighboursJoin) {
    HostChunks chunks;
    chunks.add({1000, 100, /*locked=*/false});
    chunks.add({1100, 100, /*locked=*/false});
    EXPECT_EQ(chunks.pageable_tail_bytes(1200), 200u);
    EXPECT_EQ(chunks.take(150)->begin, 1000u);
    EXPECT_EQ(chunks.pageable_tail_bytes(1200), 50u);
}

// Goal: only whole free chunks side by side make a run. Method: one byte of the middle one is
// taken.
TEST(HostChunksTest, RunEndsAtAChunkInUse) {
    HostChunks chunks = three_locked_chunks();
    chunks.take(100);
    EXPECT_EQ(chunks.take(1)->begin, 1100u);
    chunks.give(1000, 100);
    EXPECT_TRUE(chunks.remove_free_run(150).empty());
    EXPECT_EQ(chunks.free_run_bytes_ending_at(1300), 100u);

    chunks.give(1100, 1);

    EXPECT_EQ(chunks.free_run_bytes_ending_at(1300), 300u);
    EXPECT_EQ(chunks.remove_free_run(250).size(), 3u);
    EXPECT_EQ(chunks.locked_bytes(), 0u);
    EXPECT_FALSE(chunks.take(1).has_value());
}

// Goal: the smallest run that is enough is taken, and a gap between chunks breaks one.
TEST(HostChunksTest, SmallestRunThatIsEnoughIsRemoved) {
    HostChunks chunks = three_locked_chunks();
    chunks.add({2000, 80, /*locked=*/true});
    chunks.add({2080, 80, /*locked=*/true});
    const std::vector<HostChunk> run = chunks.remove_free_run(150);
    ASSERT_EQ(run.size(), 2u);
    EXPECT_EQ(run[0].begin, 2000u);
    EXPECT_TRUE(chunks.remove_free_run(301).empty());
    EXPECT_EQ(chunks.locked_chunks().size(), 3u);

    chunks.add({2000, 160, /*locked=*/true});

    EXPECT_EQ(chunks.take(150)->begin, 2000u);
}

// Goal: what is offered counts as free, in its chunk and between chunks; what is in use does not.
// Method: of three full chunks the halves are offered one after another.
TEST(HostChunksTest, OffersMakeRunsInAChunkAndOfChunks) {
    HostChunks chunks = three_locked_chunks();
    for (int i = 0; i < 3; ++i) {
        chunks.take(100);
    }
    EXPECT_FALSE(chunks.run_in_chunk(60, {{1050, 50, 1}}).has_value());
    chunks.give(1000, 50);
    EXPECT_EQ(chunks.run_in_chunk(60, {{1050, 50, 1}})->begin, 1000u);
    EXPECT_FALSE(chunks.run_in_chunk(150, {{1050, 50, 1}, {1100, 100, 2}}).has_value());
    EXPECT_FALSE(chunks.run_of_chunks(150, {{1050, 50, 1}, {1100, 50, 2}}).has_value());

    const auto run = chunks.run_of_chunks(150, {{1050, 50, 1}, {1100, 50, 2}, {1150, 50, 3}});

    ASSERT_TRUE(run.has_value());
    EXPECT_EQ(run->begin, 1000u);
    EXPECT_EQ(run->size_bytes, 200u);
}

// Goal: of the runs that would do, the one that leaves last is given up. Method: two, of which the
// hotter is larger and has one cold part more beside it than it needs.
TEST(HostChunksTest, RunWhoseColdestCopyIsHottestIsGivenUp) {
    HostChunks chunks = three_locked_chunks();
    for (int i = 0; i < 3; ++i) {
        chunks.take(100);
    }
    const std::vector<HostPart> offers{{1000, 40, 5}, {1140, 50, 9}, {1190, 10, 1}};
    EXPECT_EQ(chunks.run_in_chunk(40, offers)->begin, 1140u);
    EXPECT_EQ(chunks.run_in_chunk(40, offers)->size_bytes, 50u);
}

}  // namespace
}  // namespace trainstream
