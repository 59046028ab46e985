// Memory read bandwidth: threads sum disjoint parts of a buffer far larger than the caches.
//   membw [THREADS] [MIB] [SECONDS]     prints GB/s, the mean over the time
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

struct part {
    const uint64_t *words;
    size_t num_words;
    double seconds;
    double gb_per_s;
    uint64_t sum; // kept so that the loop is
};

static pthread_barrier_t start;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *sum_part(void *arg) {
    struct part *part = arg;
    pthread_barrier_wait(&start);
    double begin = now(), end;
    size_t passes = 0;
    do {
        // Eight chains of vector adds, so that loads are what is waited for.
        uint64_t sums[64] = {0};
        for (size_t i = 0; i < part->num_words; i += 64)
            for (int j = 0; j < 64; j++) sums[j] += part->words[i + j];
        for (int j = 0; j < 64; j++) part->sum += sums[j];
        passes++;
        end = now();
    } while (end - begin < part->seconds);
    part->gb_per_s = 8e-9 * part->num_words * passes / (end - begin);
    return NULL;
}

int main(int argc, char **argv) {
    int num_threads = argc > 1 ? atoi(argv[1]) : 2;
    size_t mib = argc > 2 ? atol(argv[2]) : 512;
    double seconds = argc > 3 ? atof(argv[3]) : 1.0;
    struct part parts[64];
    pthread_t threads[64];
    if (num_threads < 1 || num_threads > 64) return 2;
    size_t num_words = (mib << 17) / num_threads / 64 * 64;
    pthread_barrier_init(&start, NULL, num_threads);
    for (int i = 0; i < num_threads; i++) {
        void *memory = mmap(NULL, 8 * num_words, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return 1;
        madvise(memory, 8 * num_words, MADV_HUGEPAGE);
        memset(memory, i + 1, 8 * num_words);
        parts[i] = (struct part){.words = memory, .num_words = num_words, .seconds = seconds};
    }
    for (int i = 0; i < num_threads; i++) pthread_create(&threads[i], NULL, sum_part, &parts[i]);
    double total = 0;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        total += parts[i].gb_per_s;
    }
    printf("%.2f\n", total);
}
