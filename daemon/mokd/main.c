/* SPDX-License-Identifier: Apache-2.0 */
/* Command line of mokd. Exit codes: 0 ended in order, 1 failed while running, 2 wrong usage or configuration. */
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/un.h>

#include "config.h"
#include "inherited.h"
#include "server.h"
#include "sharing.h"

enum { EXIT_RUNTIME = 1, EXIT_USAGE = 2 };

struct options {
    const char *config, *socket, *runtime_dir;
    bool check;
};

static void print_help(void)
{
    printf("usage: mokd [OPTION]...\n"
           "The supervisor of MoK: owns the node's devices and serves MoE layers to training jobs.\n\n"
           "  --config FILE      configuration (default %s)\n"
           "  --check-config     say what is wrong with it, or OK, and exit\n"
           "  --socket PATH      listen here, whatever the configuration says\n"
           "  --runtime-dir DIR  where %s is, unless a path is given (default %s)\n"
           "  --version          print the version and exit\n"
           "  --help             print this and exit\n\n"
           "Exit codes: 0 ended in order, 1 failed while running, 2 wrong usage or configuration.\n",
           MOKD_DEFAULT_CONFIG, MOKD_SOCKET_NAME, MOKD_DEFAULT_RUNTIME_DIR);
}

/* -1: go on; else the exit code. */
static int parse_options(int argc, char **argv, struct options *ret)
{
    static const struct option known[] = {
        { "config", required_argument, NULL, 'c' },
        { "check-config", no_argument, NULL, 'k' },
        { "socket", required_argument, NULL, 's' },
        { "runtime-dir", required_argument, NULL, 'r' },
        { "version", no_argument, NULL, 'v' },
        { "help", no_argument, NULL, 'h' },
        { NULL, 0, NULL, 0 },
    };

    *ret = (struct options){ .config = MOKD_DEFAULT_CONFIG, .runtime_dir = MOKD_DEFAULT_RUNTIME_DIR };
    for (int c; (c = getopt_long(argc, argv, "", known, NULL)) >= 0;) {
        switch (c) {
        case 'c':
            ret->config = optarg;
            break;
        case 'k':
            ret->check = true;
            break;
        case 's':
            ret->socket = optarg;
            break;
        case 'r':
            ret->runtime_dir = optarg;
            break;
        case 'v':
            printf("mokd %s\n", MOK_BUILD_VERSION);
            return 0;
        case 'h':
            print_help();
            return 0;
        default:
            fprintf(stderr, "try: mokd --help\n");
            return EXIT_USAGE;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "mokd: %s: takes no arguments, only options\ntry: mokd --help\n", argv[optind]);
        return EXIT_USAGE;
    }
    return -1;
}

static void print_sentence(void *cookie, const char *sentence)
{
    (void)cookie;
    fprintf(stderr, "%s\n", sentence);
}

static int choose_socket(const struct options *options, const struct mokd_config *config, char *ret, size_t size)
{
    size_t bound = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
    int length;

    if (options->socket)
        length = snprintf(ret, size, "%s", options->socket);
    else if (config->socket[0])
        length = snprintf(ret, size, "%s", config->socket);
    else
        length = snprintf(ret, size, "%s/%s", options->runtime_dir, MOKD_SOCKET_NAME);
    if (length > 0 && (size_t)length <= bound)
        return 0;
    fprintf(stderr, "mokd: socket = %s: the path has %d bytes, must have 1..%zu\n", ret, length, bound);
    return -1;
}

/* Beside the client socket unless the configuration says where; "" where its path would be too long. */
static void choose_admin_socket(const struct mokd_config *config, const char *socket, char *ret, size_t size)
{
    size_t bound = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1, length = strlen(socket);
    int n = 0;

    if (length > 5 && strcmp(socket + length - 5, ".sock") == 0)
        length -= 5;
    if (config->admin_socket[0])
        n = snprintf(ret, size, "%s", config->admin_socket);
    else
        n = snprintf(ret, size, "%.*s" MOKD_ADMIN_SUFFIX, (int)length, socket);
    if (n > 0 && (size_t)n <= bound)
        return;
    fprintf(stderr, "mokd: no socket for administrators: its path %s has %d bytes, may have %zu; set admin_socket\n",
            ret, n, bound);
    ret[0] = '\0';
}

/* Beside mokd, in the build tree or when installed, unless the configuration says. */
static int choose_worker(const struct mokd_config *config, char *ret, size_t size)
{
    static const char *const places[] = { "mok-worker", "../worker/mok-worker", "../libexec/mok/mok-worker",
                                          "../lib/mok/mok-worker" };
    char own[PATH_MAX];

    if (config->worker[0]) {
        snprintf(ret, size, "%s", config->worker);
        if (access(ret, X_OK) == 0)
            return 0;
        fprintf(stderr, "mokd: worker = %s: cannot be executed\n", ret);
        return -1;
    }
    ssize_t length = readlink("/proc/self/exe", own, sizeof(own) - 1);
    own[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(own, '/');
    if (slash)
        *slash = '\0';
    for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
        int n = snprintf(ret, size, "%s/%s", own, places[i]);
        if (n > 0 && (size_t)n < size && access(ret, X_OK) == 0)
            return 0;
    }
    fprintf(stderr, "mokd: no mok-worker found near %s; set worker in [daemon]\n", own);
    return -1;
}

static int run(const struct options *options, struct mokd_config *config)
{
    char socket[MOKD_PATH_MAX], admin[MOKD_PATH_MAX], worker[PATH_MAX];
    struct mokd_error error;

    if (choose_socket(options, config, socket, sizeof(socket)) < 0 || choose_worker(config, worker, sizeof(worker)) < 0)
        return EXIT_USAGE;
    choose_admin_socket(config, socket, admin, sizeof(admin));
    if (mokd_sharing_check(config, &error) < 0) {
        fprintf(stderr, "mokd: %s\n", error.text);
        return EXIT_RUNTIME;
    }
    mok_log_open("mokd", config->log_level);
    struct mokd_inherited inherited;
    if (mokd_inherited_load(&inherited) < 0) {
        fprintf(stderr, "mokd: the service manager's descriptors cannot be taken over\n");
        return EXIT_RUNTIME;
    }
    struct mokd_options how = {
        .config = config,
        .socket = socket,
        .admin_socket = admin,
        .worker = worker,
        .inherited = &inherited,
    };
    int r = mokd_server_run(&how);
    mokd_inherited_release(&inherited);
    return r < 0 ? EXIT_RUNTIME : 0;
}

int main(int argc, char **argv)
{
    struct options options;
    struct mokd_config config;

    int code = parse_options(argc, argv, &options);
    if (code >= 0)
        return code;
    if (mokd_config_load(options.config, print_sentence, NULL, &config) < 0)
        return EXIT_USAGE;
    if (options.check) {
        puts("OK");
        code = 0;
    } else {
        code = run(&options, &config);
    }
    mokd_config_release(&config);
    return code;
}
