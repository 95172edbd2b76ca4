/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_key.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include <zmq.h>

#include "mok/types.h"
#include "util.h"

#define Z85_TEXT 41 /* of a key, terminated */
#define MAX_FILE_BYTES 4096

void mok_rack_key_text(const uint8_t key[static MOK_RACK_KEY_BYTES], char ret[static MOK_RACK_KEY_TEXT])
{
    for (size_t i = 0; i < MOK_RACK_KEY_BYTES; i++)
        snprintf(ret + 2 * i, 3, "%02x", key[i]);
}

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)tolower((unsigned char)c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int mok_rack_key_parse(const char *text, uint8_t ret[static MOK_RACK_KEY_BYTES])
{
    uint8_t key[MOK_RACK_KEY_BYTES];

    if (strlen(text) != MOK_RACK_KEY_TEXT - 1)
        return -MOK_EARG;
    for (size_t i = 0; i < MOK_RACK_KEY_BYTES; i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return -MOK_EARG;
        key[i] = (uint8_t)(16 * high + low);
    }
    memcpy(ret, key, sizeof(key));
    return 0;
}

int mok_rack_key_generate(struct mok_rack_key *ret)
{
    char public_text[Z85_TEXT], secret_text[Z85_TEXT];

    if (zmq_curve_keypair(public_text, secret_text) < 0)
        return -MOK_ENOTSUP;
    zmq_z85_decode(ret->public_key, public_text);
    zmq_z85_decode(ret->secret_key, secret_text);
    explicit_bzero(secret_text, sizeof(secret_text));
    return 0;
}

/* ------------------------------------------------------------------ writing */

static int write_error(int error)
{
    switch (error) {
    case EEXIST:
        return -MOK_EEXIST;
    case ENOENT:
    case ENOTDIR:
        return -MOK_ENOENT;
    case EACCES:
    case EPERM:
    case EROFS:
        return -MOK_EACCESS;
    }
    return -MOK_EIO;
}

/* What is there stays; what could not be written whole goes again. */
static int write_file(const char *path, mode_t mode, const char *content, char *text)
{
    size_t length = strlen(content);

    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
    if (fd >= 0 && fchmod(fd, mode) == 0 && write(fd, content, length) == (ssize_t)length && fsync(fd) == 0)
        return 0;
    int error = errno;
    if (fd >= 0)
        unlink(path);
    snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: %s%s", path, strerror(error),
             error == EEXIST ? "; a key is never written over, remove it first" : "");
    return write_error(error);
}

int mok_rack_key_write(const char *dir, const struct mok_rack_key *key, char text[static MOK_RACK_KEY_SENTENCE])
{
    char path[2][PATH_MAX], digits[MOK_RACK_KEY_TEXT], content[256];

    int length = snprintf(path[0], PATH_MAX, "%s/rack.key", dir);
    if (length < 0 || length >= PATH_MAX) {
        snprintf(text, MOK_RACK_KEY_SENTENCE, "the directory's path is longer than %d bytes", PATH_MAX - 10);
        return -MOK_ERANGE;
    }
    snprintf(path[1], PATH_MAX, "%s/rack.pub", dir);
    mok_rack_key_text(key->secret_key, digits);
    snprintf(content, sizeof(content),
             "# Secret key of a node of a MoK rack. Who has it, is that node.\nsecret_key = %s\n", digits);
    int r = write_file(path[0], 0600, content, text);
    explicit_bzero(content, sizeof(content));
    if (r < 0)
        return r;
    mok_rack_key_text(key->public_key, digits);
    snprintf(content, sizeof(content), "public_key = %s\n", digits);
    r = write_file(path[1], 0644, content, text);
    if (r < 0)
        unlink(path[0]);
    return r;
}

/* ------------------------------------------------------------------ reading */

static int check_file(int fd, const char *path, char *text)
{
    struct stat about;

    if (fstat(fd, &about) < 0) {
        snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: %s", path, strerror(errno));
        return -MOK_EIO;
    }
    if (!S_ISREG(about.st_mode) || about.st_size > MAX_FILE_BYTES) {
        snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: is no regular file of at most %d bytes", path, MAX_FILE_BYTES);
        return -MOK_EARG;
    }
    if (about.st_uid != geteuid() && about.st_uid != 0) {
        snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: belongs to user %u, must be of user %u or root", path, about.st_uid,
                 geteuid());
        return -MOK_EACCESS;
    }
    if (about.st_mode & 077) {
        snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: has mode 0%o, must be 0600: others may read or write it", path,
                 about.st_mode & 07777);
        return -MOK_EACCESS;
    }
    return 0;
}

/* The one line "secret_key = DIGITS"; comments and empty lines may stand around it. */
static int find_key(char *content, struct mok_rack_key *ret)
{
    static const char name[] = "secret_key";
    char *rest = content;

    for (char *line; (line = strsep(&rest, "\n"));) {
        line += strspn(line, " \t");
        if (strncmp(line, name, sizeof(name) - 1) != 0)
            continue;
        line += sizeof(name) - 1;
        line += strspn(line, " \t");
        if (*line != '=')
            return -MOK_EARG;
        line += 1 + strspn(line + 1, " \t");
        line[strcspn(line, " \t\r")] = '\0';
        return mok_rack_key_parse(line, ret->secret_key);
    }
    return -MOK_EARG;
}

static int make_public(struct mok_rack_key *key)
{
    char public_text[Z85_TEXT], secret_text[Z85_TEXT];

    zmq_z85_encode(secret_text, key->secret_key, MOK_RACK_KEY_BYTES);
    int r = zmq_curve_public(public_text, secret_text);
    explicit_bzero(secret_text, sizeof(secret_text));
    if (r < 0)
        return -MOK_ENOTSUP;
    zmq_z85_decode(key->public_key, public_text);
    return 0;
}

int mok_rack_key_load(const char *path, struct mok_rack_key *ret, char text[static MOK_RACK_KEY_SENTENCE])
{
    char content[MAX_FILE_BYTES + 1];
    struct mok_rack_key key;

    _cleanup_fd_ int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) {
        int error = errno;
        if (error == EACCES)
            snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: %s; it must belong to user %u, mode 0600", path, strerror(error),
                     geteuid());
        else
            snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: %s; `mokctl keygen` makes a key", path, strerror(error));
        return error == ENOENT ? -MOK_ENOENT : error == EACCES ? -MOK_EACCESS : -MOK_EIO;
    }
    int r = check_file(fd, path, text);
    if (r < 0)
        return r;
    ssize_t size = read(fd, content, MAX_FILE_BYTES);
    content[size > 0 ? size : 0] = '\0';
    r = find_key(content, &key);
    explicit_bzero(content, sizeof(content));
    if (r == 0)
        r = make_public(&key);
    if (r < 0)
        snprintf(text, MOK_RACK_KEY_SENTENCE, "%s: holds no line secret_key = and 64 hexadecimal digits", path);
    else
        *ret = key;
    explicit_bzero(&key, sizeof(key));
    return r;
}
