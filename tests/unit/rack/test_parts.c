/* SPDX-License-Identifier: Apache-2.0 */
/* Frames, inventories, decisions about who may connect, what waits for a peer, and keys: each by itself. */
#include <arpa/inet.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "rack/frame.h"
#include "rack/gate.h"
#include "rack/inventory.h"
#include "rack/lately.h"
#include "rack/link.h"
#include "rack/zap.h"
#include "rack_key.h"
#include "util.h"
#include "wire.h"

static const struct rack_versions one = { 1, 1 };

/* ------------------------------------------------------------------ frames */

static uint8_t boot_bytes[RACK_BOOT_BYTES] = { 1, 2, 3 };

static Mok__RackFrame ping_frame(Mok__RackPing *ping)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;

    *ping = (Mok__RackPing)MOK__RACK_PING__INIT;
    ping->number = 7;
    frame.sender_boot = frame.target_boot = (ProtobufCBinaryData){ .len = RACK_BOOT_BYTES, .data = boot_bytes };
    frame.body_case = MOK__RACK_FRAME__BODY_PING;
    frame.ping = ping;
    return frame;
}

/* Packs, lets `change` spoil the bytes, unpacks. */
static int round_trip(const Mok__RackFrame *frame, void (*change)(uint8_t *bytes, size_t *size))
{
    struct rack_head head = { .version = 1, .speaks = one };
    Mok__RackFrame *again = NULL;
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size;

    assert_int_equal(rack_frame_pack(&head, frame, &bytes, &size), 0);
    if (change)
        change(bytes, &size);
    int r = rack_frame_unpack(one, bytes, size, &head, &again);
    if (r == 0)
        mok_wire_free(&again->base);
    return r;
}

static void a_frame_comes_back_as_it_was_sent(void **state)
{
    struct rack_head head = { .version = 2, .speaks = { 1, 3 } };
    Mok__RackPing ping;
    Mok__RackFrame frame = ping_frame(&ping), *again;
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size;

    (void)state;
    frame.epoch = 5;
    assert_int_equal(rack_frame_pack(&head, &frame, &bytes, &size), 0);
    memset(&head, 0, sizeof(head));
    assert_int_equal(rack_frame_unpack((struct rack_versions){ 2, 2 }, bytes, size, &head, &again), 0);
    assert_int_equal(head.version, 2);
    assert_int_equal(head.speaks.max, 3);
    assert_int_equal(again->epoch, 5);
    assert_int_equal(again->ping->number, 7);
    mok_wire_free(&again->base);
}

static void spoil_magic(uint8_t *bytes, size_t *size)
{
    (void)size;
    bytes[0] ^= 1;
}

static void spoil_range(uint8_t *bytes, size_t *size)
{
    (void)size;
    bytes[5] = 3; /* oldest, above the newest */
}

static void spoil_zero(uint8_t *bytes, size_t *size)
{
    (void)size;
    bytes[4] = bytes[5] = 0;
}

static void spoil_version(uint8_t *bytes, size_t *size)
{
    (void)size;
    bytes[4] = bytes[6] = 2;
}

static void cut_head(uint8_t *bytes, size_t *size)
{
    (void)bytes;
    *size = 7;
}

static void cut_tail(uint8_t *bytes, size_t *size)
{
    (void)bytes;
    *size -= 1;
}

static void what_is_no_frame_is_refused(void **state)
{
    Mok__RackPing ping;
    Mok__RackFrame frame = ping_frame(&ping);

    (void)state;
    assert_int_equal(round_trip(&frame, NULL), 0);
    assert_int_equal(round_trip(&frame, spoil_magic), -MOK_EPROTO);
    assert_int_equal(round_trip(&frame, spoil_range), -MOK_EPROTO);
    assert_int_equal(round_trip(&frame, spoil_zero), -MOK_EPROTO);
    assert_int_equal(round_trip(&frame, cut_head), -MOK_EPROTO);
    assert_int_equal(round_trip(&frame, cut_tail), -MOK_EPROTO);
    assert_int_equal(round_trip(&frame, spoil_version), -MOK_EVERSION);
}

static void boot_ids_have_sixteen_bytes(void **state)
{
    Mok__RackPing ping;
    Mok__RackFrame frame = ping_frame(&ping);

    (void)state;
    frame.target_boot.len = 0; /* a command is for a boot */
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
    frame.target_boot.len = 15;
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
    frame = ping_frame(&ping);
    frame.sender_boot.len = 0;
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
}

static void a_hello_has_a_name_that_is_one(void **state)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackHello hello = MOK__RACK_HELLO__INIT;
    Mok__RackBeat beat = MOK__RACK_BEAT__INIT;

    (void)state;
    frame.sender_boot = (ProtobufCBinaryData){ .len = RACK_BOOT_BYTES, .data = boot_bytes };
    frame.body_case = MOK__RACK_FRAME__BODY_HELLO;
    frame.hello = &hello;
    hello.node = (char *)"n1";
    hello.beat = &beat;
    beat.epoch = 1;
    assert_int_equal(round_trip(&frame, NULL), 0);
    hello.node = (char *)"n1\033[2J";
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
    hello.node = (char *)"n1";
    hello.link_domain = (char *)"a\nb";
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
    hello.link_domain = (char *)"";
    beat.epoch = 0;
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
    hello.beat = NULL;
    assert_int_equal(round_trip(&frame, NULL), -MOK_EPROTO);
}

/* Field 1 of the frame, some thousand times: each costs little on the wire and more in memory. */
static void a_frame_that_costs_too_much_to_unpack_is_refused(void **state)
{
    static uint8_t bytes[RACK_MAX_BYTES + 1];
    struct rack_head head = { .version = 1, .speaks = one };
    const uint8_t start[RACK_HEAD_BYTES] = { 'M', 'o', 'K', 'r', 1, 1, 1, 0 };
    Mok__RackFrame *frame;
    size_t size = RACK_HEAD_BYTES;

    (void)state;
    memcpy(bytes, start, sizeof(start));
    while (size + 3 <= RACK_MAX_BYTES) { /* unknown fields: a table entry each */
        bytes[size++] = 0xf8;
        bytes[size++] = 0x7f;
        bytes[size++] = 0;
    }
    assert_int_equal(rack_frame_unpack(one, bytes, size, &head, &frame), -MOK_EPROTO);
    assert_int_equal(rack_frame_unpack(one, bytes, RACK_MAX_BYTES + 1, &head, &frame), -MOK_EPROTO);
}

static void a_body_of_a_newer_version_is_a_command_without_one(void **state)
{
    Mok__RackPing ping;
    Mok__RackFrame frame = ping_frame(&ping), *again;
    struct rack_head head = { .version = 1, .speaks = one };
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size;

    (void)state;
    frame.body_case = MOK__RACK_FRAME__BODY__NOT_SET;
    assert_int_equal(rack_frame_pack(&head, &frame, &bytes, &size), 0);
    bytes = realloc(bytes, size + 4);
    memcpy(bytes + size, "\xc2\x3e\x01x", 4); /* field 1000, one byte */
    assert_int_equal(rack_frame_unpack(one, bytes, size + 4, &head, &again), 0);
    assert_int_equal(again->body_case, MOK__RACK_FRAME__BODY__NOT_SET);
    assert_int_equal(again->base.n_unknown_fields, 0);
    mok_wire_free(&again->base);
}

static void versions_meet_at_the_newest_common_one(void **state)
{
    (void)state;
    assert_int_equal(rack_version_common((struct rack_versions){ 1, 2 }, (struct rack_versions){ 2, 3 }), 2);
    assert_int_equal(rack_version_common((struct rack_versions){ 1, 3 }, (struct rack_versions){ 1, 2 }), 2);
    assert_int_equal(rack_version_common((struct rack_versions){ 1, 1 }, (struct rack_versions){ 2, 3 }), 0);
}

/* ------------------------------------------------------------------ inventory */

static struct rack_node_config nodes[3];
static struct rack_config config;

static int setup_config(void **state)
{
    (void)state;
    memset(nodes, 0, sizeof(nodes));
    for (unsigned i = 0; i < 3; i++) {
        snprintf(nodes[i].name, sizeof(nodes[i].name), "n%u", i);
        snprintf(nodes[i].address, sizeof(nodes[i].address), "192.0.2.%u:7117", i + 1);
        memset(nodes[i].public_key, (int)i + 1, RACK_KEY_BYTES);
    }
    config =
        (struct rack_config){ .node = "n1", .heartbeat_ms = 250, .timeout_ms = 2000, .nodes = nodes, .n_nodes = 3 };
    return 0;
}

static void expect_refused(int code, const char *part)
{
    char text[RACK_MAX_TEXT];

    assert_int_equal(rack_config_check(&config, text), code);
    if (!strstr(text, part))
        fail_msg("\"%s\" does not say \"%s\"", text, part);
}

static void an_inventory_names_what_is_wrong_with_it(void **state)
{
    char text[RACK_MAX_TEXT];

    assert_int_equal(rack_config_check(&config, text), 0);
    strcpy(config.node, "n9");
    expect_refused(-MOK_EARG, "[rack] node = n9: there is no section");
    setup_config(state);
    strcpy(nodes[2].name, "n0");
    expect_refused(-MOK_EEXIST, "[node n0]");
    setup_config(state);
    memset(nodes[2].public_key, 1, RACK_KEY_BYTES);
    expect_refused(-MOK_EEXIST, "[node n2]: has the name, address or public key of [node n0]");
    setup_config(state);
    strcpy(nodes[2].address, "host.example:7117");
    expect_refused(-MOK_EARG, "[node n2] address = host.example:7117");
    setup_config(state);
    config.heartbeat_ms = 9;
    expect_refused(-MOK_ERANGE, "heartbeat_ms = 9: must be in 10..60000");
    setup_config(state);
    config.timeout_ms = 749;
    expect_refused(-MOK_ERANGE, "timeout_ms = 749: must be in 750..600000");
}

static void addresses_are_numbers_and_a_port(void **state)
{
    static const char *const good[] = { "127.0.0.1:1", "192.0.2.1:65535", "[::1]:7117", "[2001:db8::1]:7117" };
    static const char *const bad[] = { "",       "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:7117x",
                                       ":7117",  "*:7117",    "::1:7117",    "[::1]",           "[]:7117",
                                       "[:7117", "host:7117", "1.2.3:7117",  "127.0.0.1:-1",    "[::1%lo]:7117" };
    struct rack_address address;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(good); i++)
        assert_int_equal(rack_address_parse(good[i], &address), 0);
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        if (rack_address_parse(bad[i], &address) != -MOK_EARG)
            fail_msg("\"%s\" is taken for an address", bad[i]);
}

static void the_hash_is_of_what_nodes_must_agree_on(void **state)
{
    uint64_t hash = rack_config_hash(&config);
    struct rack_node_config first = nodes[0];

    (void)state;
    nodes[0] = nodes[2];
    nodes[2] = first;
    assert_true(rack_config_hash(&config) == hash); /* the order is nothing */
    strcpy(nodes[0].address, "198.51.100.1:1");
    assert_true(rack_config_hash(&config) == hash);
    nodes[0].public_key[31]++;
    assert_true(rack_config_hash(&config) != hash);
    nodes[0].public_key[31]--;
    strcpy(nodes[0].link_domain, "x");
    assert_true(rack_config_hash(&config) != hash);
    nodes[0].link_domain[0] = '\0';
    config.n_nodes = 2;
    assert_true(rack_config_hash(&config) != hash);
}

/* ------------------------------------------------------------------ who may connect */

static bool allow_ones(void *cookie, const uint8_t public_key[static RACK_KEY_BYTES])
{
    ++*(unsigned *)cookie;
    return public_key[0] == 1 && public_key[RACK_KEY_BYTES - 1] == 1;
}

/* The status of a request whose frame `which` is another (RACK_ZAP_FRAMES: none is). */
static const char *status_with(size_t which, const char *data, size_t size, size_t count, unsigned *ret_asked)
{
    static struct rack_zap_answer answer;
    uint8_t key[RACK_KEY_BYTES];
    struct rack_zap_frame frames[RACK_ZAP_FRAMES + 1] = {
        { "1.0", 3 },         { "7", 1 }, { RACK_ZAP_DOMAIN, strlen(RACK_ZAP_DOMAIN) },
        { "192.0.2.1", 9 },   { "", 0 },  { "CURVE", 5 },
        { key, sizeof(key) }, { "", 0 },
    };

    memset(key, 1, sizeof(key));
    if (which < RACK_ZAP_FRAMES)
        frames[which] = (struct rack_zap_frame){ data, size };
    *ret_asked = 0;
    rack_zap_decide(frames, count, allow_ones, ret_asked, &answer);
    assert_true((strcmp(answer.status, "200") == 0) == (answer.user_id[0] != '\0'));
    return answer.status;
}

static void only_keys_of_the_inventory_get_in(void **state)
{
    static const char stranger[RACK_KEY_BYTES] = { 2 };
    unsigned asked;

    (void)state;
    assert_string_equal(status_with(RACK_ZAP_FRAMES, NULL, 0, 7, &asked), "200");
    assert_int_equal(asked, 1);
    assert_string_equal(status_with(6, stranger, sizeof(stranger), 7, &asked), "400");
    assert_int_equal(asked, 1);
    assert_string_equal(status_with(6, stranger, 31, 7, &asked), "400"); /* no key at all */
    assert_int_equal(asked, 0);
    assert_string_equal(status_with(5, "NULL", 4, 7, &asked), "400");
    assert_string_equal(status_with(5, "PLAIN", 5, 7, &asked), "400");
    assert_string_equal(status_with(2, "other", 5, 7, &asked), "400");
    assert_string_equal(status_with(2, "", 0, 7, &asked), "400");
    assert_string_equal(status_with(0, "2.0", 3, 7, &asked), "400");
    assert_string_equal(status_with(RACK_ZAP_FRAMES, NULL, 0, 6, &asked), "400");
    assert_string_equal(status_with(RACK_ZAP_FRAMES, NULL, 0, 8, &asked), "400");
    assert_string_equal(status_with(RACK_ZAP_FRAMES, NULL, 0, 1, &asked), "500");
    assert_int_equal(asked, 0);
}

/* ------------------------------------------------------------------ the gate */

/* Whether a connection from `source` gets through to the socket. */
static bool gets_in(struct rack_gate *gate, int family, const char *source)
{
    struct sockaddr_storage server = { 0 };
    struct sockaddr_in v4 = { .sin_family = AF_INET };
    struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };
    struct pollfd accepted = { .fd = gate->fd, .events = POLLIN };
    socklen_t size = sizeof(server);

    inet_pton(AF_INET, source, &v4.sin_addr);
    inet_pton(AF_INET6, source, &v6.sin6_addr);
    assert_int_equal(getsockname(gate->fd, (struct sockaddr *)&server, &size), 0);
    _cleanup_fd_ int fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (family == AF_INET)
        assert_int_equal(bind(fd, (struct sockaddr *)&v4, sizeof(v4)), 0);
    else
        assert_int_equal(bind(fd, (struct sockaddr *)&v6, sizeof(v6)), 0);
    connect(fd, (struct sockaddr *)&server, size);
    if (poll(&accepted, 1, 200) != 1)
        return false;
    _cleanup_fd_ int connection = accept(gate->fd, NULL, NULL);
    return connection >= 0;
}

static void the_gate_lets_in_whom_it_is_told_to(void **state)
{
    struct rack_gate gate = RACK_GATE_INIT;
    struct rack_address members[3];
    char text[RACK_MAX_TEXT], address[64];
    int fd;

    (void)state;
    snprintf(address, sizeof(address), "127.9.%d.1:7118", getpid() % 250);
    assert_int_equal(rack_address_parse("127.0.0.5:1", &members[0]), 0);
    assert_int_equal(rack_address_parse("[2001:db8::5]:1", &members[1]), 0);
    assert_int_equal(rack_address_parse("127.0.0.6:1", &members[2]), 0);
    assert_int_equal(rack_gate_open(&gate, address, &fd, text), 0);
    assert_true(gets_in(&gate, AF_INET, "127.0.0.9"));
    assert_true(rack_gate_set(&gate, RACK_GATE_MEMBERS, members, 3));
    assert_false(gets_in(&gate, AF_INET, "127.0.0.9"));
    assert_true(gets_in(&gate, AF_INET, "127.0.0.5"));
    assert_true(gets_in(&gate, AF_INET, "127.0.0.6"));
    assert_true(rack_gate_set(&gate, RACK_GATE_CLOSED, members, 3));
    assert_false(gets_in(&gate, AF_INET, "127.0.0.5"));
    assert_true(rack_gate_set(&gate, RACK_GATE_OPEN, NULL, 0));
    assert_true(gets_in(&gate, AF_INET, "127.0.0.9"));
    mok_close(fd);
    rack_gate_close(&gate);
}

static void the_gate_knows_ipv6(void **state)
{
    struct rack_gate gate = RACK_GATE_INIT;
    struct rack_address members[2];
    char text[RACK_MAX_TEXT], address[64];
    int fd;

    (void)state;
    snprintf(address, sizeof(address), "[::1]:%d", 20000 + getpid() % 10000);
    if (rack_gate_open(&gate, address, &fd, text) < 0)
        skip(); /* no IPv6 here */
    assert_int_equal(rack_address_parse("[2001:db8::5]:1", &members[0]), 0);
    assert_int_equal(rack_address_parse("[::1]:1", &members[1]), 0);
    assert_true(rack_gate_set(&gate, RACK_GATE_MEMBERS, members, 1));
    assert_false(gets_in(&gate, AF_INET6, "::1"));
    assert_true(rack_gate_set(&gate, RACK_GATE_MEMBERS, members, 2));
    assert_true(gets_in(&gate, AF_INET6, "::1"));
    mok_close(fd);
    rack_gate_close(&gate);
}

/* ------------------------------------------------------------------ how often of late */

static void what_is_five_minutes_old_counts_no_more(void **state)
{
    const uint64_t second = 1000000000, begin = 86400 * second;
    struct rack_lately lately = { 0 };

    (void)state;
    assert_int_equal(rack_lately_count(&lately, begin), 0);
    rack_lately_add(&lately, 3, begin);
    rack_lately_add(&lately, 1, begin + second);
    rack_lately_add(&lately, 2, begin + 100 * second);
    assert_int_equal(rack_lately_count(&lately, begin + 100 * second), 6);
    assert_int_equal(rack_lately_count(&lately, begin + 280 * second), 6);
    assert_int_equal(rack_lately_count(&lately, begin + 301 * second), 2);
    rack_lately_add(&lately, 5, begin + 301 * second); /* where the first ones were */
    assert_int_equal(rack_lately_count(&lately, begin + 301 * second), 7);
    assert_int_equal(rack_lately_count(&lately, begin + 402 * second), 5);
    assert_int_equal(rack_lately_count(&lately, begin + 86400 * second), 0);
}

/* ------------------------------------------------------------------ what waits for a peer */

#define SLOT 5u

static struct rack_link *waiting_link;

static void wake_nobody(void *cookie)
{
    (void)cookie;
}

static int start_link(void **state)
{
    struct rack_link_config link_config = { .versions = one, .timeout_ms = 1000 };
    char address[RACK_MAX_ADDRESS + 1], text[RACK_MAX_TEXT];
    struct mok_rack_key key;

    (void)state;
    snprintf(address, sizeof(address), "127.251.%d.%d:7117", getpid() / 256 % 256, getpid() % 256);
    link_config.listen = address;
    if (mok_rack_key_generate(&key) < 0)
        return -1;
    memcpy(link_config.public_key, key.public_key, RACK_KEY_BYTES);
    memcpy(link_config.secret_key, key.secret_key, RACK_KEY_BYTES);
    return rack_link_start(&link_config, wake_nobody, NULL, &waiting_link, text);
}

static int stop_link(void **state)
{
    (void)state;
    rack_link_stop(waiting_link);
    return 0;
}

static int send_something(void)
{
    return rack_link_send(waiting_link, SLOT, calloc(1, 16), 16);
}

static void send_much(void)
{
    for (unsigned i = 0; i < RACK_QUEUE_MESSAGES; i++)
        send_something();
}

/* As a node that nobody answers for: what is sent to it waits. */
static void use_slot(uint32_t serial)
{
    static const uint8_t key[RACK_KEY_BYTES] = { 1 };

    assert_int_equal(rack_link_add(waiting_link, SLOT, serial, "127.0.0.1:1", key), 0);
}

static void expect_room_for_all(void)
{
    for (unsigned i = 0; i < RACK_QUEUE_MESSAGES; i++)
        assert_int_equal(send_something(), 0);
    assert_int_equal(send_something(), -MOK_EAGAIN);
}

/* The thread has done what it was asked before, twice over. */
static void let_the_thread_turn(void)
{
    for (int i = 0; i < 3; i++) {
        uint64_t rounds = rack_link_rounds(waiting_link);
        rack_link_bar(waiting_link, SLOT + 1); /* wakes it */
        for (int patience = 0; rack_link_rounds(waiting_link) == rounds; patience++) {
            assert_in_range(patience, 0, 30000);
            usleep(1000);
        }
    }
}

static void what_waited_for_who_had_a_slot_takes_no_room_from_the_next(void **state)
{
    (void)state;
    use_slot(1);
    expect_room_for_all();
    let_the_thread_turn();
    rack_link_remove(waiting_link, SLOT);
    let_the_thread_turn();
    use_slot(2);
    expect_room_for_all();
}

static void what_is_sent_to_a_slot_of_nobody_takes_no_room_from_the_next(void **state)
{
    (void)state;
    use_slot(1);
    rack_link_remove(waiting_link, SLOT);
    send_much();
    let_the_thread_turn();
    use_slot(2);
    expect_room_for_all();
}

static void last_words_to_who_was_never_called_take_no_room_from_the_next(void **state)
{
    (void)state;
    send_much();
    rack_link_remove(waiting_link, SLOT); /* what has not been taken yet is kept for the goodbye */
    let_the_thread_turn();
    use_slot(2);
    expect_room_for_all();
}

/* ------------------------------------------------------------------ keys */

static char dir[64], key_path[96];

static int setup_dir(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/mok-key-XXXXXX");
    snprintf(key_path, sizeof(key_path), "%s/rack.key", mkdtemp(dir));
    return 0;
}

static int remove_dir(void **state)
{
    char path[96];

    (void)state;
    unlink(key_path);
    snprintf(path, sizeof(path), "%s/rack.pub", dir);
    unlink(path);
    return rmdir(dir);
}

static void a_key_is_read_as_it_was_written(void **state)
{
    char text[MOK_RACK_KEY_SENTENCE];
    struct mok_rack_key key, again;
    struct stat about;

    (void)state;
    assert_int_equal(mok_rack_key_generate(&key), 0);
    assert_int_equal(mok_rack_key_write(dir, &key, text), 0);
    assert_int_equal(stat(key_path, &about), 0);
    assert_int_equal(about.st_mode & 07777, 0600);
    assert_int_equal(mok_rack_key_load(key_path, &again, text), 0);
    assert_memory_equal(&again, &key, sizeof(key)); /* the public one is made of the secret one */
    assert_int_equal(mok_rack_key_write(dir, &key, text), -MOK_EEXIST);
    assert_non_null(strstr(text, "never written over"));
}

static void write_text(const char *text)
{
    FILE *file = fopen(key_path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    chmod(key_path, 0600);
}

static void a_key_that_others_can_read_is_refused(void **state)
{
    char text[MOK_RACK_KEY_SENTENCE];
    struct mok_rack_key key;

    (void)state;
    assert_int_equal(mok_rack_key_load(key_path, &key, text), -MOK_ENOENT);
    assert_int_equal(mok_rack_key_generate(&key), 0);
    assert_int_equal(mok_rack_key_write(dir, &key, text), 0);
    chmod(key_path, 0640);
    assert_int_equal(mok_rack_key_load(key_path, &key, text), -MOK_EACCESS);
    assert_non_null(strstr(text, "has mode 0640, must be 0600"));
    assert_int_equal(mok_rack_key_load(dir, &key, text), -MOK_EARG);
}

static void a_file_without_a_key_is_named(void **state)
{
    static const char *const bad[] = {
        "",
        "secret_key",
        "secret_key = ",
        "secret_key = 00",
        "secret_key = 000000000000000000000000000000000000000000000000000000000000000g",
        "public_key = 0000000000000000000000000000000000000000000000000000000000000001",
    };
    char text[MOK_RACK_KEY_SENTENCE];
    struct mok_rack_key key;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        write_text(bad[i]);
        if (mok_rack_key_load(key_path, &key, text) != -MOK_EARG)
            fail_msg("\"%s\" is taken for a key", bad[i]);
    }
    write_text("# words\n\n \tsecret_key =\t0000000000000000000000000000000000000000000000000000000000000001 \r\n");
    assert_int_equal(mok_rack_key_load(key_path, &key, text), 0);
    assert_int_equal(key.secret_key[31], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_frame_comes_back_as_it_was_sent),
        cmocka_unit_test(what_is_no_frame_is_refused),
        cmocka_unit_test(boot_ids_have_sixteen_bytes),
        cmocka_unit_test(a_hello_has_a_name_that_is_one),
        cmocka_unit_test(a_frame_that_costs_too_much_to_unpack_is_refused),
        cmocka_unit_test(a_body_of_a_newer_version_is_a_command_without_one),
        cmocka_unit_test(versions_meet_at_the_newest_common_one),
        cmocka_unit_test_setup(an_inventory_names_what_is_wrong_with_it, setup_config),
        cmocka_unit_test(addresses_are_numbers_and_a_port),
        cmocka_unit_test_setup(the_hash_is_of_what_nodes_must_agree_on, setup_config),
        cmocka_unit_test(only_keys_of_the_inventory_get_in),
        cmocka_unit_test(the_gate_lets_in_whom_it_is_told_to),
        cmocka_unit_test(the_gate_knows_ipv6),
        cmocka_unit_test(what_is_five_minutes_old_counts_no_more),
        cmocka_unit_test_setup_teardown(what_waited_for_who_had_a_slot_takes_no_room_from_the_next, start_link,
                                        stop_link),
        cmocka_unit_test_setup_teardown(what_is_sent_to_a_slot_of_nobody_takes_no_room_from_the_next, start_link,
                                        stop_link),
        cmocka_unit_test_setup_teardown(last_words_to_who_was_never_called_take_no_room_from_the_next, start_link,
                                        stop_link),
        cmocka_unit_test_setup_teardown(a_key_is_read_as_it_was_written, setup_dir, remove_dir),
        cmocka_unit_test_setup_teardown(a_key_that_others_can_read_is_refused, setup_dir, remove_dir),
        cmocka_unit_test_setup_teardown(a_file_without_a_key_is_named, setup_dir, remove_dir),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
