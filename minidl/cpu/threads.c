// Run the programs of a grid on threads. A program takes the next number when it is free; nothing depends on the order.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LEAST 20000  // nanoseconds of work that are worth a second thread, estimated by the first program
#define SPINS 4000   // pauses, of 10 to 40 ns, before a thread sleeps: waking it takes longer than a small kernel

#if defined(__x86_64__)
#define PAUSE __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE __asm__ volatile("yield")
#else
#define PAUSE (void)0
#endif

typedef void (*Kernel)(const int64_t *args, char *scratch, const int64_t *grid, int64_t begin, int64_t end);

static struct {
  pthread_mutex_t launch, lock;
  pthread_cond_t start, done;
  Kernel kernel;
  const char *name;
  const int64_t *args, *grid;
  int64_t programs, chunk;
  size_t scratch;
  atomic_llong next;
  atomic_int failed;
  atomic_ullong turn;
  int workers, wanted;
  atomic_int active;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};

static __thread const char *running;  // the kernel of this thread, for `crashed`
static struct sigaction former[NSIG];

static void crashed(int number, siginfo_t *info, void *context) {
  char text[400];
  const char *form = "minidl: %s read or wrote outside of its tensors (signal %d); MINIDL_CPU=interpreted and "
                     "`minidl sanitize` name the line\n";
  int size = running ? snprintf(text, sizeof text, form, running, number) : 0;
  if (size && write(2, text, size < (int)sizeof text ? size : (int)sizeof text - 1) < 0) running = 0;
  sigaction(number, &former[number], 0);
  if (info->si_code <= 0) raise(number);  // sent by a process; else the instruction runs again
}

static pthread_key_t freed;  // when a thread ends

static char *memory(size_t size) {
  static __thread char *block;
  static __thread size_t bytes;
  if (size > bytes) {
    free(block);
    bytes = (size + 4095) / 4096 * 4096;
    block = aligned_alloc(4096, bytes);
    if (!block) bytes = 0;
    pthread_setspecific(freed, block);
  }
  return block;
}

static int work(Kernel kernel, const char *name, const int64_t *args, const int64_t *grid, size_t scratch, int64_t begin, int64_t end) {
  char *block = memory(scratch + 64);  // vectors may end behind the last block
  if (!block) return 1;
  running = name;
  kernel(args, block, grid, begin, end);
  running = 0;
  return 0;
}

static void share(void) {
  for (;;) {
    int64_t begin = atomic_fetch_add(&pool.next, pool.chunk), end = begin + pool.chunk;
    if (begin >= pool.programs) return;
    if (work(pool.kernel, pool.name, pool.args, pool.grid, pool.scratch, begin, end < pool.programs ? end : pool.programs))
      atomic_store(&pool.failed, 1);
  }
}

static void *worker(void *number) {
  uint64_t seen = 0;
  for (;;) {
    for (int i = 0; i < SPINS && atomic_load(&pool.turn) == seen; i++) PAUSE;
    pthread_mutex_lock(&pool.lock);
    while (pool.turn == seen) pthread_cond_wait(&pool.start, &pool.lock);
    seen = pool.turn;
    int joins = (int)(intptr_t)number < pool.wanted;
    pool.active += joins;
    pthread_mutex_unlock(&pool.lock);
    if (!joins) continue;
    share();
    pthread_mutex_lock(&pool.lock);
    if (--pool.active == 0) pthread_cond_signal(&pool.done);
    pthread_mutex_unlock(&pool.lock);
  }
  return 0;
}

static void after_fork(void) {
  pthread_mutex_init(&pool.launch, 0);
  pthread_mutex_init(&pool.lock, 0);
  pthread_cond_init(&pool.start, 0);
  pthread_cond_init(&pool.done, 0);
  pool.workers = pool.active = 0;
}

// Returns 1 if there is no memory for the blocks of a program.
int launch(
    Kernel kernel, const char *name, const int64_t *args, const int64_t *grid, int64_t scratch, int threads) {
  int64_t programs = grid[0] * grid[1] * grid[2];
  struct timespec start, end;
  if (programs <= 0) return 0;
  clock_gettime(CLOCK_MONOTONIC, &start);
  if (work(kernel, name, args, grid, scratch, 0, 1)) return 1;
  clock_gettime(CLOCK_MONOTONIC, &end);
  int64_t rest = (programs - 1) * ((end.tv_sec - start.tv_sec) * 1000000000 + end.tv_nsec - start.tv_nsec);
  if (threads >= programs) threads = programs - 1;
  if (threads <= 1 || rest < LEAST || pthread_mutex_trylock(&pool.launch))
    return work(kernel, name, args, grid, scratch, 1, programs);
  pthread_mutex_lock(&pool.lock);
  while (pool.workers < threads - 1) {
    pthread_t thread;
    if (pthread_create(&thread, 0, worker, (void *)(intptr_t)pool.workers)) break;
    pthread_detach(thread);
    pool.workers++;
  }
  pool.wanted = pool.workers < threads - 1 ? pool.workers : threads - 1;
  pool.kernel = kernel;
  pool.name = name;
  pool.args = args;
  pool.grid = grid;
  pool.programs = programs;
  pool.chunk = programs / (16 * threads) + 1;
  pool.scratch = scratch;
  atomic_store(&pool.next, 1);
  atomic_store(&pool.failed, 0);
  pool.turn++;
  pthread_cond_broadcast(&pool.start);
  pthread_mutex_unlock(&pool.lock);
  share();
  for (int i = 0; i < SPINS && atomic_load(&pool.active); i++) PAUSE;
  pthread_mutex_lock(&pool.lock);
  pool.wanted = 0;  // a thread that has not woken is not waited for
  while (pool.active) pthread_cond_wait(&pool.done, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  int failed = atomic_load(&pool.failed);
  pthread_mutex_unlock(&pool.launch);
  return failed;
}

__attribute__((constructor)) static void prepare(void) {
  pthread_key_create(&freed, free);
  struct sigaction action = {.sa_sigaction = crashed, .sa_flags = SA_NODEFER | SA_ONSTACK | SA_SIGINFO};
  pthread_atfork(0, 0, after_fork);
  sigaction(SIGSEGV, &action, &former[SIGSEGV]);
  sigaction(SIGBUS, &action, &former[SIGBUS]);
}
