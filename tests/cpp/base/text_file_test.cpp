#include "base/text_file.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace trainstream {
namespace {

TEST(TextFileTest, MissingFileIsNothing) {
    EXPECT_FALSE(read_text_file("/no/such/file").has_value());
}

// Goal: a file longer than one read comes back whole. Method: the kernel's list of mounts or limits
// may have any length, so a temporary file of 10,000 bytes.
TEST(TextFileTest, ReadsAFileLongerThanOnePiece) {
    const std::string path = testing::TempDir() + "text_file_test";
    std::FILE* file = std::fopen(path.c_str(), "w");
    ASSERT_NE(file, nullptr);
    const std::string text(10000, 'x');
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);

    EXPECT_EQ(read_text_file(path), text);
    std::remove(path.c_str());
}

TEST(TextFileTest, LinesEndWithOrWithoutANewline) {
    EXPECT_EQ(lines_of("a\n\nb"), (std::vector<std::string_view>{"a", "", "b"}));
    EXPECT_EQ(lines_of("a\n"), (std::vector<std::string_view>{"a"}));
    EXPECT_TRUE(lines_of("").empty());
}

TEST(TextFileTest, LeadingNumberSkipsBlanksAndRefusesWords) {
    EXPECT_EQ(leading_number("  42 kB"), 42);
    EXPECT_EQ(leading_number("-1\n"), -1);
    EXPECT_FALSE(leading_number("max").has_value());
    EXPECT_FALSE(leading_number("").has_value());
}

}  // namespace
}  // namespace trainstream
