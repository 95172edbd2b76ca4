/* SPDX-License-Identifier: Apache-2.0 */
/* mokctl keygen: the two keys of a rack's node, into files. Never prints the secret one, never writes over a key. */
#include <getopt.h>
#include <stdio.h>

#include "mok/mok.h"
#include "mokctl.h"
#include "names.h"
#include "rack_key.h"

enum { EXIT_OK = 0, EXIT_REFUSED = 1, EXIT_USAGE = 2 };

static int make(const char *dir)
{
    char text[MOK_RACK_KEY_SENTENCE], digits[MOK_RACK_KEY_TEXT];
    struct mok_rack_key key;

    int r = mok_rack_key_generate(&key);
    if (r < 0)
        snprintf(text, sizeof(text), "this machine's libzmq has no CURVE");
    else
        r = mok_rack_key_write(dir, &key, text);
    if (r < 0) {
        fprintf(stderr, "mokctl: %s (%s)\n", text, mok_error_symbol(r));
        return EXIT_REFUSED;
    }
    mok_rack_key_text(key.public_key, digits);
    fprintf(stderr,
            "%s/rack.key: for [rack] key of this node; keep it secret\n"
            "%s/rack.pub: for [node NAME] of every node:\n",
            dir, dir);
    printf("public_key = %s\n", digits);
    return fflush(stdout) == 0 ? EXIT_OK : EXIT_REFUSED;
}

int mokctl_keygen(int argc, char **argv)
{
    static const struct option options[] = {
        { "out", required_argument, NULL, 'o' },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    const char *dir = ".";

    for (int c; (c = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        switch (c) {
        case 'o':
            dir = optarg;
            break;
        case 'h':
            fputs(mokctl_usage, stdout);
            return EXIT_OK;
        default:
            fputs("try: mokctl --help\n", stderr);
            return EXIT_USAGE;
        }
    }
    if (optind == argc)
        return make(dir);
    fprintf(stderr, "mokctl: keygen takes no \"%s\"\ntry: mokctl --help\n", argv[optind]);
    return EXIT_USAGE;
}
