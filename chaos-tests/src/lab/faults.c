/* Preloaded into one role: makes its disk slow or broken and its wall clock wrong, as a page shared with the harness says.
   The page is an array of 64-bit numbers; preload.rs names them. Only files under TIDEPOOL_FAULTS_UNDER are touched. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SYNC_DELAY_US, SYNC_ERRNO, WRITE_ERRNO, TEAR_WRITE, WALL_OFFSET_MS, SYNC_HITS, WRITE_HITS, CLOCK_HITS, SYNC_LIES, KNOBS };

static volatile int64_t none[KNOBS];
static volatile int64_t *knobs = none;

__attribute__((constructor)) static void open_page(void) {
    const char *path = getenv("TIDEPOOL_FAULTS");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(0, KNOBS * sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) knobs = page;
}

static int concerns(int file) {
    static const char *under;
    char link[64], path[4096];
    if (!under && !(under = getenv("TIDEPOOL_FAULTS_UNDER"))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, under, strlen(under));
}

/* As long as the knob says, which may change meanwhile: a disk that hangs is mended by setting it to 0. */
static void wait_long(void) {
    const int64_t step = 10000;
    for (int64_t waited = 0, left; (left = knobs[SYNC_DELAY_US] - waited) > 0; waited += step) usleep(left < step ? left : step);
}

static int sync_with(int (*real)(int), int file) {
    int64_t delay = knobs[SYNC_DELAY_US], error = knobs[SYNC_ERRNO], lies = knobs[SYNC_LIES];
    if ((delay || error || lies) && concerns(file)) {
        __sync_fetch_and_add(&knobs[SYNC_HITS], 1);
        if (delay) wait_long();
        if (error) { errno = error; return -1; }
        if (lies) return 0;
    }
    return real(file);
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fsync");
    return sync_with(real, file);
}

int fdatasync(int file) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "fdatasync");
    return sync_with(real, file);
}

ssize_t write(int file, const void *bytes, size_t length) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    if ((knobs[WRITE_ERRNO] || knobs[TEAR_WRITE]) && file > 2 && concerns(file)) {
        __sync_fetch_and_add(&knobs[WRITE_HITS], 1);
        if (knobs[TEAR_WRITE]) { real(file, bytes, length / 2); _exit(137); }
        errno = knobs[WRITE_ERRNO];
        return -1;
    }
    return real(file, bytes, length);
}

ssize_t pwrite64(int file, const void *bytes, size_t length, off64_t at) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    if ((knobs[WRITE_ERRNO] || knobs[TEAR_WRITE]) && concerns(file)) {
        __sync_fetch_and_add(&knobs[WRITE_HITS], 1);
        if (knobs[TEAR_WRITE]) { real(file, bytes, length / 2, at); _exit(137); }
        errno = knobs[WRITE_ERRNO];
        return -1;
    }
    return real(file, bytes, length, at);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int outcome = real(clock, now);
    int64_t offset = knobs[WALL_OFFSET_MS];
    if (!outcome && offset && clock == CLOCK_REALTIME) {
        __sync_fetch_and_add(&knobs[CLOCK_HITS], 1);
        now->tv_sec += offset / 1000;
        now->tv_nsec += offset % 1000 * 1000000;
        if (now->tv_nsec >= 1000000000) { now->tv_sec++; now->tv_nsec -= 1000000000; }
        if (now->tv_nsec < 0) { now->tv_sec--; now->tv_nsec += 1000000000; }
    }
    return outcome;
}
