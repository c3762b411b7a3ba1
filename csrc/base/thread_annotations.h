// csrc/base/thread_annotations.h: clang's thread-safety attributes; empty for other compilers.
#pragma once

#if defined(__clang__)
#define TS_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define TS_THREAD_ATTRIBUTE(x)
#endif

#define TS_CAPABILITY(name) TS_THREAD_ATTRIBUTE(capability(name))
#define TS_SCOPED_CAPABILITY TS_THREAD_ATTRIBUTE(scoped_lockable)
#define TS_GUARDED_BY(lock) TS_THREAD_ATTRIBUTE(guarded_by(lock))
#define TS_REQUIRES(...) TS_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define TS_EXCLUDES(...) TS_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define TS_ACQUIRE(...) TS_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TS_RELEASE(...) TS_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define TS_NO_THREAD_SAFETY_ANALYSIS TS_THREAD_ATTRIBUTE(no_thread_safety_analysis)
