// tests/cpp/support/made_up_system.h: files as the kernel shows them, for code that reads these.
#pragma once

#include <unistd.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace trainstream::testing {

/// Files below a directory of the test's own, removed at the end.
class MadeUpSystem : public ::testing::Test {
protected:
    MadeUpSystem() {
        const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
        root_ = std::filesystem::temp_directory_path() /
                (std::string(test->test_suite_name()) + "_" + std::to_string(getpid()) + "_" +
                 test->name());
    }
    ~MadeUpSystem() override { std::filesystem::remove_all(root_); }

    void write(const std::string& path, const std::string& text) {
        const std::filesystem::path file = root_.string() + path;
        std::filesystem::create_directories(file.parent_path());
        std::ofstream(file) << text;
    }
    std::string root() const { return root_.string(); }

private:
    std::filesystem::path root_;
};

}  // namespace trainstream::testing
