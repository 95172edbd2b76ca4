/* SPDX-License-Identifier: Apache-2.0 */
#include "doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "plain.h"

static const char *const verdicts[] = {
    [DOCTOR_OK] = "ok", [DOCTOR_NONE] = "-", [DOCTOR_WARN] = "warn", [DOCTOR_FAIL] = "FAIL"
};

void doctor_say(struct doctor *doctor, const char *name, enum doctor_verdict verdict, const char *remedy,
                const char *format, ...)
{
    va_list arguments;

    if (doctor->count == DOCTOR_FINDINGS)
        return;
    struct doctor_finding *finding = &doctor->finding[doctor->count++];
    finding->name = name;
    finding->verdict = verdict;
    va_start(arguments, format);
    vsnprintf(finding->text, sizeof(finding->text), format, arguments);
    va_end(arguments);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s", remedy ? remedy : "");
}

/* ------------------------------------------------------------------ asking others, for a while */

static int left_ms(const struct timespec *begin)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    long gone = (now.tv_sec - begin->tv_sec) * 1000 + (now.tv_nsec - begin->tv_nsec) / 1000000;
    return gone >= DOCTOR_PATIENCE_MS ? 0 : (int)(DOCTOR_PATIENCE_MS - gone);
}

/* The length read until the end; -1 when that did not come in time. */
static int read_all(int fd, char *ret, size_t size)
{
    struct timespec begin;
    size_t length = 0;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (;;) {
        struct pollfd wait = { .fd = fd, .events = POLLIN };
        char rest[256];
        int r = poll(&wait, 1, left_ms(&begin));
        if (r < 0 && errno == EINTR)
            continue;
        if (r <= 0)
            return -1;
        bool full = length + 1 >= size;
        ssize_t got = read(fd, full ? rest : ret + length, full ? sizeof(rest) : size - 1 - length);
        if (got <= 0)
            break;
        length += full ? 0 : (size_t)got;
    }
    ret[length] = '\0';
    return (int)length;
}

static int finish(pid_t child, int fd, char *ret, size_t size)
{
    int status = 0, length = read_all(fd, ret, size);

    close(fd);
    if (length < 0)
        kill(child, SIGKILL);
    /* One that is stuck in a driver does not even die: it is left to whoever inherits it. */
    for (int i = 0; i < 20 && waitpid(child, &status, WNOHANG) == 0; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 10000000 }, NULL);
    if (length < 0)
        return -1;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? length : -2;
}

static pid_t begin(int *ret_fd)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) < 0)
        return -1;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDOUT_FILENO);
        dup2(ends[1], STDERR_FILENO);
        return 0;
    }
    close(ends[1]);
    if (child < 0)
        close(ends[0]);
    *ret_fd = ends[0];
    return child;
}

int doctor_ask_program(const char *const *argv, char *ret, size_t size)
{
    int fd = -1;
    pid_t child = begin(&fd);

    if (child == 0) {
        execvp(argv[0], (char *const *)argv);
        _exit(127);
    }
    return child < 0 ? -2 : finish(child, fd, ret, size);
}

int doctor_ask_child(void (*function)(void), char *ret, size_t size)
{
    int fd = -1;
    pid_t child = begin(&fd);

    if (child == 0) {
        function();
        fflush(stdout);
        _exit(0);
    }
    return child < 0 ? -2 : finish(child, fd, ret, size);
}

bool doctor_read_line(const char *path, char *ret, size_t size)
{
    FILE *file = fopen(path, "re");

    if (!file)
        return false;
    bool got = fgets(ret, (int)size, file) != NULL;
    fclose(file);
    if (got)
        ret[strcspn(ret, "\n")] = '\0';
    return got;
}

/* ------------------------------------------------------------------ the whole */

const Mok__StatusReply *doctor_status(const struct doctor *doctor)
{
    return doctor->status.reply ? doctor->status.reply->status : NULL;
}

void doctor_examine(const struct mokctl_line *line, struct doctor *ret)
{
    *ret = (struct doctor){ .socket = line->socket, .config = line->config };
    ret->hello = (struct control_answer)CONTROL_ANSWER_INIT;
    ret->status = (struct control_answer)CONTROL_ANSWER_INIT;
    doctor_daemon(ret);
    doctor_machine(ret);
    doctor_gpu(ret);
}

void doctor_release(struct doctor *doctor)
{
    control_answer_clear(&doctor->hello);
    control_answer_clear(&doctor->status);
    control_close(doctor->control);
}

enum doctor_verdict doctor_worst(const struct doctor *doctor)
{
    enum doctor_verdict worst = DOCTOR_OK;

    for (size_t i = 0; i < doctor->count; i++)
        if (doctor->finding[i].verdict > worst)
            worst = doctor->finding[i].verdict;
    return worst;
}

static unsigned count_of(const struct doctor *doctor, enum doctor_verdict verdict)
{
    unsigned count = 0;

    for (size_t i = 0; i < doctor->count; i++)
        count += doctor->finding[i].verdict == verdict;
    return count;
}

cJSON *doctor_json(const struct doctor *doctor)
{
    static const char *const words[] = {
        [DOCTOR_OK] = "ok", [DOCTOR_NONE] = "none", [DOCTOR_WARN] = "warn", [DOCTOR_FAIL] = "fail"
    };
    cJSON *root = cJSON_CreateObject(), *array = cJSON_AddArrayToObject(root, "checks");

    for (size_t i = 0; i < doctor->count; i++) {
        const struct doctor_finding *finding = &doctor->finding[i];
        cJSON *entry = cJSON_CreateObject();
        cJSON_AddStringToObject(entry, "check", finding->name);
        cJSON_AddStringToObject(entry, "verdict", words[finding->verdict]);
        cJSON_AddStringToObject(entry, "text", finding->text);
        if (finding->remedy[0])
            cJSON_AddStringToObject(entry, "remedy", finding->remedy);
        cJSON_AddItemToArray(array, entry);
    }
    mokctl_json_number(root, "warnings", count_of(doctor, DOCTOR_WARN));
    mokctl_json_number(root, "failures", count_of(doctor, DOCTOR_FAIL));
    return root;
}

static void print(const struct doctor *doctor)
{
    for (size_t i = 0; i < doctor->count; i++) {
        const struct doctor_finding *finding = &doctor->finding[i];
        char clean[sizeof(finding->text)];
        snprintf(clean, sizeof(clean), "%s", finding->text);
        mok_plain_text(clean, ""); /* one line */
        printf("%-5s %-12s %s\n", verdicts[finding->verdict], finding->name, clean);
        if (finding->remedy[0])
            printf("                   -> %s\n", finding->remedy);
    }
    printf("\n%u failures, %u warnings, %u checks\n", count_of(doctor, DOCTOR_FAIL), count_of(doctor, DOCTOR_WARN),
           (unsigned)doctor->count);
}

int mokctl_doctor(struct mokctl_line *line)
{
    struct doctor doctor;
    int r = 0;

    doctor_examine(line, &doctor);
    if (line->json)
        r = mokctl_json_print(doctor_json(&doctor));
    else
        print(&doctor);
    if (r == 0 && doctor_worst(&doctor) == DOCTOR_FAIL)
        r = EXIT_REFUSED;
    doctor_release(&doctor);
    return r;
}
