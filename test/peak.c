// peak.c: runs a program and prints, as the last line on stderr, the most memory that it had at a time, in bytes: what
// `/usr/bin/time -f %M` would say where it is installed.      peak PROGRAM FLAGS...
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char** argv) {
    int status = 0;
    struct rusage used;
    pid_t child = argc > 1 ? fork() : -1;
    if (child == 0) { execv(argv[1], argv + 1); _exit(127); }
    if (child < 0 || waitpid(child, &status, 0) != child || getrusage(RUSAGE_CHILDREN, &used) != 0) return 127;
#ifdef __APPLE__
    fprintf(stderr, "%lld\n", (long long)used.ru_maxrss);
#else
    fprintf(stderr, "%lld\n", used.ru_maxrss * 1024LL);
#endif
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}
