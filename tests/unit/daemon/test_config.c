/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration parser: what it takes, and that it names file, line, key, value and bound of what it does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "config.h"
#include "memory_bound.h"
#include "sharing.h"

#define PATH_TEMPLATE "/tmp/mokd-config-XXXXXX"

static char sentences[32][1024];
static size_t n_sentences;

static void take(void *cookie, const char *sentence)
{
    (void)cookie;
    assert_true(n_sentences < 32);
    snprintf(sentences[n_sentences++], sizeof(sentences[0]), "%s", sentence);
}

static int load(const char *text, struct mokd_config *ret)
{
    char path[] = PATH_TEMPLATE;
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
    n_sentences = 0;
    int r = mokd_config_load(path, take, NULL, ret);
    unlink(path);
    return r;
}

/* The text must be refused with exactly one sentence, at `line`, that has `part` in it. */
static void expect_refusal(const char *text, unsigned line, const char *part)
{
    struct mokd_config config;
    char place[32];

    assert_int_equal(load(text, &config), -MOK_EARG);
    assert_int_equal(n_sentences, 1);
    snprintf(place, sizeof(place), ":%u: ", line);
    if (line > 0 && !strstr(sentences[0], place))
        fail_msg("\"%s\" does not say line %u", sentences[0], line);
    if (!strstr(sentences[0], part))
        fail_msg("\"%s\" does not say \"%s\"", sentences[0], part);
}

#define DEVICE "[device host0]\n"

static void a_device_alone_is_a_configuration(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load(DEVICE, &config), 0);
    assert_int_equal(config.n_devices, 1);
    assert_string_equal(config.devices[0].name, "host0");
    assert_int_equal(config.devices[0].kind, MOK_DEVICE_HOST);
    assert_int_equal(config.devices[0].threads, 1);
    assert_true(config.devices[0].memory > 0);
    assert_int_equal(config.socket_mode, 0666);
    assert_string_equal(config.socket, "");
    mokd_config_release(&config);
}

static void every_key_arrives(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("# comment\n"
                          "[daemon]\n"
                          "socket = /run/x/s\n"
                          "socket_mode = 0660\n"
                          "log_level = debug\n"
                          "worker = /usr/libexec/w\n"
                          "poll_us = 50\n"
                          "[limits]\n"
                          "bytes = 2G\n"
                          "sessions = 3\n"
                          "groups = 4\n"
                          "queue_entries = 128\n"
                          "layers = 5\n"
                          "buffers = 6\n"
                          "descriptors = 7\n"
                          "weight = 8\n"
                          "priority = high\n"
                          "exclusive = yes\n"
                          "devices = b\n"
                          "[device a]\n"
                          "  threads = 7 ; indented, with a comment\n"
                          "  memory = 3M\n"
                          "  chaos_delay_us = 9\n"
                          "[device b]\n"
                          "kind = host\n",
                          &config),
                     0);
    assert_string_equal(config.socket, "/run/x/s");
    assert_int_equal(config.socket_mode, 0660);
    assert_int_equal(config.log_level, MOK_LOG_DEBUG);
    assert_string_equal(config.worker, "/usr/libexec/w");
    assert_int_equal(config.poll_us, 50);
    assert_int_equal(config.limits.of[MOKD_BYTES], 2ull << 30);
    assert_int_equal(config.limits.of[MOKD_SESSIONS], 3);
    assert_int_equal(config.limits.of[MOKD_GROUPS], 4);
    assert_int_equal(config.limits.queue_entries, 128);
    assert_int_equal(config.limits.of[MOKD_LAYERS], 5);
    assert_int_equal(config.limits.of[MOKD_BUFFERS], 6);
    assert_int_equal(config.limits.of[MOKD_DESCRIPTORS], 7);
    assert_int_equal(config.limits.weight, 8);
    assert_int_equal(config.limits.priority, MOK_PRIORITY_HIGH);
    assert_int_equal(config.limits.exclusive, 1);
    assert_int_equal(config.limits.devices, 2);
    assert_int_equal(config.n_devices, 2);
    assert_int_equal(config.devices[0].threads, 7);
    assert_int_equal(config.devices[0].memory, 3 << 20);
    assert_int_equal(config.devices[0].chaos_delay_us, 9);
    assert_string_equal(config.devices[1].name, "b");
    mokd_config_release(&config);
}

#if defined(MOK_HAVE_CUDA)
static void a_gpu_leaves_room_for_others_as_the_file_says(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("[device g]\nkind = cuda\nmemory = 1G\nreserve_sms = 16\nyield_us = 200\n", &config), 0);
    assert_int_equal(config.devices[0].reserve_sms, 16);
    assert_int_equal(config.devices[0].yield_us, 200);
    mokd_config_release(&config);
    expect_refusal("[device h]\nyield_us = 200\n", 0, "[device h] yield_us: only a device of kind cuda has it");
}
#endif

static void a_users_limits_override_the_general_ones_wherever_they_stand(void **state)
{
    struct mokd_limits limits;
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("[user 4242]\nsessions = 2\n[limits]\nsessions = 9\nbuffers = 8\n" DEVICE, &config), 0);
    mokd_config_limits(&config, 4242, NULL, 0, &limits);
    assert_int_equal(limits.of[MOKD_SESSIONS], 2);
    assert_int_equal(limits.of[MOKD_BUFFERS], 8);
    mokd_config_limits(&config, 4243, NULL, 0, &limits);
    assert_int_equal(limits.of[MOKD_SESSIONS], 9);
    mokd_config_release(&config);
}

static void the_most_specific_section_wins_and_what_is_counted_binds_a_group_as_a_whole(void **state)
{
    const gid_t gids[] = { 600, 500 };
    struct mokd_limits limits;
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("[group 500]\nweight = 5\npriority = low\nbytes = 1M\n"
                          "[group 600]\nweight = 6\ndevices = host0\nexclusive = yes\n"
                          "[user 7]\npriority = high\n"
                          "[limits]\nbytes = 2M\nweight = 2\n" DEVICE "[device host1]\n",
                          &config),
                     0);
    mokd_config_limits(&config, 7, gids, 2, &limits);
    assert_int_equal(limits.priority, MOK_PRIORITY_HIGH); /* his own */
    assert_int_equal(limits.weight, 5);                   /* of the first of his groups in the file */
    assert_int_equal(limits.devices, 1);
    assert_int_equal(limits.exclusive, 1);
    assert_int_equal(limits.of[MOKD_BYTES], 2 << 20); /* the group's is all its members' */
    assert_true(mokd_config_gives(mokd_config_group(&config, 500), MOKD_BYTES));
    assert_false(mokd_config_gives(mokd_config_group(&config, 600), MOKD_BYTES));
    assert_null(mokd_config_group(&config, 700));
    mokd_config_limits(&config, 8, NULL, 0, &limits);
    assert_int_equal(limits.weight, 2);
    assert_int_equal(limits.devices, UINT64_MAX);
    mokd_config_release(&config);
}

static void users_and_groups_may_be_named(void **state)
{
    struct mokd_limits limits;
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("[user root]\nbytes = 1K\n[group root]\nsessions = 5\n[daemon]\nadmin_group = root\n" DEVICE,
                          &config),
                     0);
    mokd_config_limits(&config, 0, NULL, 0, &limits);
    assert_int_equal(limits.of[MOKD_BYTES], 1024);
    assert_int_equal(mokd_config_group(&config, 0)->limits.of[MOKD_SESSIONS], 5);
    assert_int_equal(config.has_admin_group, 1);
    assert_int_equal(config.admin_gid, 0);
    mokd_config_release(&config);
}

static void sizes_have_binary_suffixes(void **state)
{
    uint64_t bytes;

    (void)state;
    assert_int_equal(mokd_parse_size("0", &bytes), 0);
    assert_int_equal(bytes, 0);
    assert_int_equal(mokd_parse_size("12k", &bytes), 0);
    assert_int_equal(bytes, 12 << 10);
    assert_int_equal(mokd_parse_size("1T", &bytes), 0);
    assert_int_equal(bytes, 1ull << 40);
    assert_int_equal(mokd_parse_size("18446744073709551615", &bytes), 0);
    assert_int_equal(mokd_parse_size("18446744073709551616", &bytes), -MOK_ERANGE);
    assert_int_equal(mokd_parse_size("99999999999T", &bytes), -MOK_ERANGE);
    assert_int_equal(mokd_parse_size("", &bytes), -MOK_EARG);
    assert_int_equal(mokd_parse_size("-1", &bytes), -MOK_EARG);
    assert_int_equal(mokd_parse_size("16KiB", &bytes), 0);
    assert_int_equal(bytes, 16384);
    assert_int_equal(mokd_parse_size("2GiB", &bytes), 0);
    assert_int_equal(bytes, UINT64_C(2) << 30);
    assert_int_equal(mokd_parse_size("1KB", &bytes), -MOK_EARG);
    assert_int_equal(mokd_parse_size("1Ki", &bytes), -MOK_EARG);
    assert_int_equal(mokd_parse_size("1KiBs", &bytes), -MOK_EARG);
    assert_int_equal(mokd_parse_size("1iB", &bytes), -MOK_EARG);
    assert_int_equal(mokd_parse_size("1 K", &bytes), -MOK_EARG);
}

static void refusals_name_line_key_value_and_bound(void **state)
{
    (void)state;
    expect_refusal("[daemon]\nsocket = s\n" DEVICE, 2, "[daemon] socket = s: must be an absolute path");
    expect_refusal("[daemon]\nsocket_mode = 1777\n" DEVICE, 2,
                   "socket_mode = 1777: must be an octal mode in 0600..0777");
    expect_refusal("[daemon]\nlog_level = loud\n" DEVICE, 2, "log_level = loud: must be error,");
    expect_refusal("[daemon]\npoll_us = 1000001\n" DEVICE, 2, "poll_us = 1000001: must be in 0..1000000");
    expect_refusal("[daemon]\npoll_us = 5x\n" DEVICE, 2, "poll_us = 5x: not a number");
    expect_refusal("[daemon]\npoll_us = 5K\n" DEVICE, 2, "poll_us = 5K: not a number");
    expect_refusal("[daemon]\nspeed = 1\n" DEVICE, 2, "[daemon] speed = 1: unknown key");
    expect_refusal("[daemon]\nworker =\n" DEVICE, 2, "worker: has no value");
    expect_refusal("[limits]\nqueue_entries = 3\n" DEVICE, 2, "queue_entries = 3: must be in 4..4096");
    expect_refusal("[limits]\nqueue_entries = 100\n" DEVICE, 2,
                   "queue_entries = 100: must be a power of two in 4..4096");
    expect_refusal("[limits]\nweight = 1001\n" DEVICE, 2, "weight = 1001: must be in 1..1000");
    expect_refusal("[limits]\npriority = urgent\n" DEVICE, 2, "priority = urgent: must be low, normal or high");
    expect_refusal("[limits]\nexclusive = 1\n" DEVICE, 2, "exclusive = 1: must be yes or no");
    expect_refusal("[limits]\nsessions = 0\n" DEVICE, 2, "sessions = 0: must be in 1..100000");
    expect_refusal(DEVICE "threads = 0\n", 2, "[device host0] threads = 0: must be in 1..1024");
    expect_refusal(DEVICE "memory = 1K\n", 2, "memory = 1K: must be at least 1M");
    expect_refusal(DEVICE "memory = lots\n", 2, "memory = lots: not a number");
    expect_refusal(DEVICE "kind = tpu\n", 2, "kind = tpu: must be host or cuda");
    expect_refusal("[daemon]\nsharing = both\n" DEVICE, 2, "sharing = both: must be slices or mps");
    expect_refusal("[daemon]\nsharing = mps\n" DEVICE, 0, "mps_pipe is missing");
    expect_refusal("[daemon]\nmps_pipe = /run/mps\n" DEVICE, 0, "no meaning without sharing = mps");
    expect_refusal("[daemon]\nmps = own\n" DEVICE, 0, "no meaning without sharing = mps");
    expect_refusal("[daemon]\nsharing = mps\nmps_pipe = /m\nmps = theirs\n" DEVICE, 4, "must be site or own");
    expect_refusal("[daemon]\ndevice_failure = ignore\n" DEVICE, 2, "must be serve or exit");
    expect_refusal("[daemon]\nstart_timeout = 0\n" DEVICE, 2, "must be in 1..86400");
    expect_refusal("[device a]\nmps_pipe = /run/mps\n", 0, "only a GPU with sharing = mps and mps = site has one");
}

static void refusals_name_structure(void **state)
{
    (void)state;
    expect_refusal("", 0, "at least one device");
    expect_refusal("[daemon]\n", 0, "at least one device");
    expect_refusal(DEVICE "threads = 1\nthreads = 2\n", 3, "threads = 2: the key is there twice");
    expect_refusal(DEVICE "[daemon]\n" DEVICE, 3, "[device host0]: the device is there twice");
    expect_refusal("[daemon]\n[daemon]\n" DEVICE, 2, "[daemon]: the section is there twice");
    expect_refusal("[user root]\n[user 0]\n" DEVICE, 2, "[user 0]: the user is there twice");
    expect_refusal("[user no.such.user]\n" DEVICE, 1, "[user no.such.user]: this machine knows no such user");
    expect_refusal("[device a/b]\n" DEVICE, 1, "[device a/b]: a device's name has 1..63");
    expect_refusal("[devices]\n" DEVICE, 1, "[devices]: unknown section");
    expect_refusal("socket = /x\n" DEVICE, 1, "stands before the first section");
    expect_refusal("[daemon\n" DEVICE, 1, "ends with ]");
    expect_refusal(DEVICE "threads\n", 2, "neither a [section] nor a key = value");
}

static void all_errors_are_told_at_once(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("[daemon]\npoll_us = -1\nnonsense\n[device d]\nthreads = x\n", &config), -MOK_EARG);
    assert_int_equal(n_sentences, 3);
}

static void a_line_too_long_is_one_error(void **state)
{
    char text[1024] = "[daemon]\nsocket = /";

    (void)state;
    memset(text + strlen(text), 'x', 600);
    strcat(text, "\n" DEVICE);
    expect_refusal(text, 2, "longer than 197 bytes");
}

static void a_path_longer_than_a_socket_address_is_refused(void **state)
{
    char text[256] = "[daemon]\nsocket = /";

    (void)state;
    memset(text + strlen(text), 'x', 107);
    strcat(text, "\n" DEVICE);
    expect_refusal(text, 2, "108 bytes long, at most 107");
}

static void what_is_in_the_file_tells_no_terminal_what_to_do(void **state)
{
    (void)state;
    expect_refusal("[daemon]\nsocket = \033[31m\n" DEVICE, 2, "socket = ?[31m");
}

static void more_devices_than_the_bound_are_refused(void **state)
{
    char text[2048] = "", line[32];

    (void)state;
    for (unsigned i = 0; i <= MOK_MAX_DEVICES; i++) {
        snprintf(line, sizeof(line), "[device d%u]\n", i);
        strcat(text, line);
    }
    expect_refusal(text, MOK_MAX_DEVICES + 1, "at most 64 devices");
}

static void a_file_that_is_not_there_is_named(void **state)
{
    struct mokd_config config;

    (void)state;
    n_sentences = 0;
    assert_int_equal(mokd_config_load("/nonexistent/conf", take, NULL, &config), -MOK_ENOENT);
    assert_int_equal(n_sentences, 1);
    assert_non_null(strstr(sentences[0], "/nonexistent/conf: cannot be read"));
}

static void what_is_no_regular_file_is_refused_unread(void **state)
{
    struct mokd_config config;

    (void)state;
    n_sentences = 0;
    assert_int_equal(mokd_config_load("/dev/zero", take, NULL, &config), -MOK_EARG);
    assert_int_equal(n_sentences, 1);
    assert_non_null(strstr(sentences[0], "/dev/zero: is no regular file of at most 1048576 bytes"));
}

static void a_pipe_that_nobody_writes_to_holds_nobody_up(void **state)
{
    char dir[] = "/tmp/mokd-test-XXXXXX", path[64];
    struct mokd_config config;

    (void)state;
    n_sentences = 0;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/conf", dir);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(30); /* rather than for ever */
    assert_int_equal(mokd_config_load(path, take, NULL, &config), -MOK_EARG);
    alarm(0);
    assert_non_null(strstr(sentences[0], "is no regular file"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0);
}

/* What listens, reads or just lies in a control daemon's place. */
static void mps_needs_a_control_daemon_that_answers(void **state)
{
    struct mokd_config config = { .sharing = MOKD_SHARING_SLICES };
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    struct mokd_error error = { 0 };
    char dir[] = "/tmp/mok-mps-XXXXXX";
    (void)state;

    assert_int_equal(mokd_sharing_check(&config, &error), 0);
    assert_non_null(mkdtemp(dir));
    config.sharing = MOKD_SHARING_MPS;
    snprintf(config.mps_pipe, sizeof(config.mps_pipe), "%s", dir);
    assert_int_equal(mokd_sharing_check(&config, &error), -MOK_ESHARING);
    assert_non_null(strstr(error.text, dir));
    assert_non_null(strstr(error.text, "nvidia-cuda-mps-control -d"));

    snprintf(at.sun_path, sizeof(at.sun_path), "%s/control", dir);
    int control = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(control, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(control, 4), 0);
    assert_int_equal(mokd_sharing_check(&config, &error), 0);
    close(control); /* it died and left its socket */
    assert_int_equal(mokd_sharing_check(&config, &error), -MOK_ESHARING);
    unlink(at.sun_path);

    assert_int_equal(mkfifo(at.sun_path, 0600), 0);
    assert_int_equal(mokd_sharing_check(&config, &error), -MOK_ESHARING);
    int reader = open(at.sun_path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    assert_int_equal(mokd_sharing_check(&config, &error), 0);
    close(reader);
    unlink(at.sun_path);
    rmdir(dir);
}

#define KEY1 "1111111111111111111111111111111111111111111111111111111111111111"
#define KEY2 "2222222222222222222222222222222222222222222222222222222222222222"
#define RACK                                                                                                           \
    "[rack]\nnode = n1\nkey = /etc/mok/rack.key\n"                                                                     \
    "[node n1]\naddress = 192.0.2.1:7117\npublic_key = " KEY1 "\n"                                                    \
    "[node n2]\naddress = 192.0.2.2:7117\npublic_key = " KEY2 "\n"

static void a_rack_and_its_nodes_arrive(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load(DEVICE, &config), 0);
    assert_string_equal(config.rack.node, ""); /* in no rack */
    mokd_config_release(&config);
    assert_int_equal(load(DEVICE RACK "link_domain = far\n", &config), 0);
    assert_string_equal(config.rack.node, "n1");
    assert_string_equal(config.rack.key, "/etc/mok/rack.key");
    assert_string_equal(config.rack.listen, "");
    assert_int_equal(config.rack.heartbeat_ms, 250);
    assert_int_equal(config.rack.timeout_ms, 2000);
    assert_int_equal(config.rack.n_nodes, 2);
    assert_string_equal(config.rack.nodes[1].name, "n2");
    assert_string_equal(config.rack.nodes[1].address, "192.0.2.2:7117");
    assert_string_equal(config.rack.nodes[1].link_domain, "far");
    assert_string_equal(config.rack.nodes[0].link_domain, "");
    assert_int_equal(config.rack.nodes[1].public_key[31], 0x22);
    mokd_config_release(&config);
}

static void a_link_domain_of_the_rack_is_that_of_nodes_that_name_none(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load(DEVICE RACK "link_domain = far\n[node n3]\naddress = 192.0.2.3:1\n"
                                      "public_key = 33333333333333333333333333333333333333333333333333333333333333aB\n",
                          &config),
                     0);
    mokd_config_release(&config);
    assert_int_equal(load(DEVICE "[rack]\nlink_domain = near\nheartbeat_ms = 100\ntimeout_ms = 400\n"
                                 "listen = 0.0.0.0:7117\nnode = n1\nkey = /k\n"
                                 "[node n1]\naddress = [2001:db8::1]:7117\npublic_key = " KEY1 "\n",
                          &config),
                     0);
    assert_string_equal(config.rack.nodes[0].link_domain, "near");
    assert_string_equal(config.rack.listen, "0.0.0.0:7117");
    assert_int_equal(config.rack.heartbeat_ms, 100);
    mokd_config_release(&config);
}

static void expect_sentence(const char *part)
{
    for (size_t i = 0; i < n_sentences; i++)
        if (strstr(sentences[i], part))
            return;
    fail_msg("nothing says \"%s\"", part);
}

static void errors_of_every_kind_are_told_at_once(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("[daemon]\nspeed = 1\n[user no.such.user]\nweight = 0\n[device a/b]\nthreads = 0\n"
                          "[rack]\nnode = n 1\n[node n2]\naddress = host:1\n[node n/3]\npublic_key = 1\n",
                          &config),
                     -MOK_EARG);
    expect_sentence("speed = 1: unknown key");
    expect_sentence("knows no such user");
    expect_sentence("[user no.such.user] weight = 0: must be in 1..1000");
    expect_sentence("[device a/b]: a device's name");
    expect_sentence("[device a/b] threads = 0: must be in");
    expect_sentence("node = n 1: must have");
    expect_sentence("[node n2] address = host:1: must be an address");
    expect_sentence("[node n/3]: a node's name");
    expect_sentence("[node n/3] public_key = 1: must be the 64");
    expect_sentence("at least one device");
    expect_sentence("[rack] key: missing");
    expect_sentence("[node n2] public_key: missing");
    assert_int_equal(n_sentences, 12); /* and nothing that is there is said to be missing */
    assert_int_equal(load(DEVICE "[rack]\nnode = n1\nkey = /k\n[node n1]\naddress = 192.0.2.3:1\npublic_key = "
                                 "0000000000000000000000000000000000000000000000000000000000000000\n",
                          &config),
                     -MOK_EARG);
    expect_sentence("[node n1] public_key: is all zeros");
}

static void what_is_wrong_with_a_rack_is_named(void **state)
{
    (void)state;
    expect_refusal(DEVICE "[rack]\nnode = n1\n", 0, "[rack] key: missing");
    expect_refusal(DEVICE "[rack]\nkey = /k\n", 0, "[rack] node: missing");
    expect_refusal(DEVICE "[rack]\nnode = n1\nkey = /k\n", 0, "[rack] node = n1: there is no section [node n1]");
    expect_refusal(DEVICE "[rack]\nnode = n 1\nkey = /k\n", 3, "[rack] node = n 1: must have 1..63");
    expect_refusal(DEVICE "[node n1]\n", 0, "[node n1]: has no meaning without [rack]");
    expect_refusal(DEVICE RACK "[node n2]\n", 11, "[node n2]: the node is there twice");
    expect_refusal(DEVICE RACK "[node n3]\naddress = 192.0.2.3:1\n", 0, "[node n3] public_key: missing");
    expect_refusal(DEVICE RACK "[node n3]\npublic_key = " KEY1 "\n", 0, "[node n3] address: missing");
    expect_refusal(DEVICE RACK "[node n3]\naddress = host:1\npublic_key = " KEY1 "\n", 12,
                   "must be an address in numbers and a port");
    expect_refusal(DEVICE RACK "[node n3]\npublic_key = 12\naddress = 192.0.2.3:1\n", 12, "64 hexadecimal digits");
    expect_refusal(DEVICE RACK "[node n3]\naddress = 192.0.2.1:7117\npublic_key = " KEY2 "\n", 0,
                   "[node n3]: has the name, address or public key of [node n1]");
    expect_refusal(DEVICE "[rack]\nnode = n1\nkey = /k\nheartbeat_ms = 1\n", 5, "must be in 10..60000");
    expect_refusal(DEVICE "[rack]\nnode = n1\nkey = /k\nnewest_protocol = 3\n", 5, "must be in 1..2");
    expect_refusal(DEVICE RACK "[rack]\n", 11, "the section is there twice");
}

/* ------------------------------------------------------------------ memory */

static void put(const char *root, const char *path, const char *text)
{
    char command[1024];

    snprintf(command, sizeof(command), "f=%s/%s; mkdir -p \"${f%%/*}\" && printf '%s' > \"$f\"", root, path, text);
    assert_int_equal(system(command), 0);
}

static void the_memory_there_is_is_the_least_that_a_control_group_around_leaves(void **state)
{
    char root[] = "/tmp/mokd-groups-XXXXXX", command[64];

    (void)state;
    assert_non_null(mkdtemp(root));
    assert_true(mokd_memory_bound_of_groups(root) == UINT64_MAX); /* no control groups */
    put(root, "proc/self/cgroup", "0::/a.slice/mokd.service\\n");
    assert_true(mokd_memory_bound_of_groups(root) == UINT64_MAX); /* without a controller of memory */
    put(root, "sys/fs/cgroup/a.slice/mokd.service/memory.max", "max\\n");
    assert_true(mokd_memory_bound_of_groups(root) == UINT64_MAX);
    put(root, "sys/fs/cgroup/a.slice/memory.max", "3000000\\n");
    assert_int_equal(mokd_memory_bound_of_groups(root), 3000000);
    put(root, "sys/fs/cgroup/a.slice/mokd.service/memory.max", "2000000\\n");
    assert_int_equal(mokd_memory_bound_of_groups(root), 2000000);
    /* The first version, as in older machines and containers. */
    put(root, "proc/self/cgroup", "5:cpu:/x\\n4:memory:/a/b\\n0::/\\n");
    put(root, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\\n");
    put(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\\n");
    assert_int_equal(mokd_memory_bound_of_groups(root), 1000000);
    assert_true(mokd_memory_bound(NULL) > 0);
    snprintf(command, sizeof(command), "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_memory_there_is_is_the_least_that_a_control_group_around_leaves),
        cmocka_unit_test(a_device_alone_is_a_configuration),
        cmocka_unit_test(every_key_arrives),
#if defined(MOK_HAVE_CUDA)
        cmocka_unit_test(a_gpu_leaves_room_for_others_as_the_file_says),
#endif
        cmocka_unit_test(a_users_limits_override_the_general_ones_wherever_they_stand),
        cmocka_unit_test(the_most_specific_section_wins_and_what_is_counted_binds_a_group_as_a_whole),
        cmocka_unit_test(users_and_groups_may_be_named),
        cmocka_unit_test(errors_of_every_kind_are_told_at_once),
        cmocka_unit_test(sizes_have_binary_suffixes),
        cmocka_unit_test(refusals_name_line_key_value_and_bound),
        cmocka_unit_test(refusals_name_structure),
        cmocka_unit_test(all_errors_are_told_at_once),
        cmocka_unit_test(a_line_too_long_is_one_error),
        cmocka_unit_test(a_path_longer_than_a_socket_address_is_refused),
        cmocka_unit_test(what_is_in_the_file_tells_no_terminal_what_to_do),
        cmocka_unit_test(more_devices_than_the_bound_are_refused),
        cmocka_unit_test(a_file_that_is_not_there_is_named),
        cmocka_unit_test(what_is_no_regular_file_is_refused_unread),
        cmocka_unit_test(a_pipe_that_nobody_writes_to_holds_nobody_up),
        cmocka_unit_test(mps_needs_a_control_daemon_that_answers),
        cmocka_unit_test(a_rack_and_its_nodes_arrive),
        cmocka_unit_test(a_link_domain_of_the_rack_is_that_of_nodes_that_name_none),
        cmocka_unit_test(what_is_wrong_with_a_rack_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
