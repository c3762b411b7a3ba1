// tests/cpp/support/in_child.h: a check that runs in a forked child, as in a data-loader worker.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

namespace trainstream::testing {

/// Runs `body` in a forked child; true when it returned true there.
template <typename Body>
bool holds_in_child(const Body& body) {
    const pid_t child = fork();
    if (child == 0) {
        _exit(body() ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace trainstream::testing
