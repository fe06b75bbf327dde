// Clients of a server over HTTP/1.1, for serve.py: each connection sends a request, and again once it has its answer.
//
//     load PORT CONNECTIONS SECONDS FILE
//
// FILE has the request as it is sent. One thread serves all connections, so that it takes little of the machine.
// It prints as JSON: answers with status 200, the milliseconds within which half of them and 99 of 100 came,
// answers with another status, and connections that were lost, which it makes again.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { HEAD_BYTES = 16 << 10, PART_BYTES = 1 << 20, EVENTS = 256 };
static const long CHUNKS = 1L << 60;

struct connection {
    int fd;
    size_t sent;      // of the request
    long missing;     // of the answer's body; CHUNKS: until the last one; -1: its head is not complete
    size_t head_size;
    char head[HEAD_BYTES + 1];
    double begin;
};

static char *request, part[PART_BYTES];
static size_t request_size;
static int port, poller;
static double *latencies;
static long answers, refused, lost;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

// 0, or -1 if the connection is lost.
static int send_more(struct connection *c) {
    while (c->sent < request_size) {
        ssize_t count = write(c->fd, request + c->sent, request_size - c->sent);
        if (count < 0 && errno != EAGAIN) return -1;
        if (count < 0) break;
        c->sent += count;
    }
    int wanted = c->sent < request_size ? EPOLLIN | EPOLLOUT : EPOLLIN;
    return epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &(struct epoll_event){wanted, {.ptr = c}});
}

static int ask(struct connection *c) {
    c->sent = c->head_size = 0;
    c->missing = -1;
    c->begin = now();
    return send_more(c);
}

static void open_again(struct connection *c) {
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons(port)};
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (double end = now() + 20; now() < end; usleep(10000)) {
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        if (connect(c->fd, (struct sockaddr *)&server, sizeof server) == 0) {
            fcntl(c->fd, F_SETFL, O_NONBLOCK);
            epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){EPOLLIN, {.ptr = c}});
            if (ask(c) == 0) return;
        }
        close(c->fd);
        lost++;
    }
    fprintf(stderr, "no connection to port %d\n", port);
    exit(1);
}

// Take what came: 1 if the answer is complete, 0 if there is more to come, -1 if the connection is lost.
static int receive(struct connection *c) {
    ssize_t count = read(c->fd, part, PART_BYTES);
    if (count <= 0) return count < 0 && errno == EAGAIN ? 0 : -1;
    if (c->missing < 0) {
        size_t taken = HEAD_BYTES - c->head_size < (size_t)count ? HEAD_BYTES - c->head_size : (size_t)count;
        memcpy(c->head + c->head_size, part, taken);
        c->head[c->head_size += taken] = 0;
        char *end = memmem(c->head, c->head_size, "\r\n\r\n", 4);
        if (end == NULL) return c->head_size < HEAD_BYTES ? 0 : -1;
        char *length = strcasestr(c->head, "\r\ncontent-length:");
        // What has come of the body: all of `head` beyond its end, and what `head` has no room for.
        long body = (long)c->head_size - (end + 4 - c->head) + count - (long)taken;
        c->missing = length == NULL || length > end ? CHUNKS : atol(length + 17) - body;
    } else if (c->missing != CHUNKS) {
        c->missing -= count;
    }
    if (c->missing == CHUNKS) return count >= 5 && memcmp(part + count - 5, "0\r\n\r\n", 5) == 0;
    return c->missing <= 0;
}

static int compare(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

int main(int count, char **words) {
    if (count != 5) return 2;
    port = atoi(words[1]);
    int connections = atoi(words[2]);
    FILE *file = fopen(words[4], "rb");
    if (file == NULL || fseek(file, 0, SEEK_END)) return 2;
    request_size = ftell(file);
    request = malloc(request_size);
    rewind(file);
    if (fread(request, 1, request_size, file) != request_size) return 2;
    long room = 1 << 20;
    latencies = malloc(room * sizeof *latencies);
    poller = epoll_create1(0);
    struct connection *all = calloc(connections, sizeof *all);
    for (int i = 0; i < connections; i++) open_again(all + i);
    struct epoll_event events[EVENTS];
    double begin = now(), end = begin + atof(words[3]);
    while (now() < end) {
        int ready = epoll_wait(poller, events, EVENTS, 20);
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            int state = events[i].events & EPOLLOUT ? send_more(c) : 0;
            if (state == 0 && events[i].events & ~EPOLLOUT) state = receive(c);
            if (state == 1 && atoi(c->head + 9) != 200) {
                refused++;
            } else if (state == 1) {
                if (answers == room) latencies = realloc(latencies, (room *= 2) * sizeof *latencies);
                latencies[answers++] = now() - c->begin;
            }
            if (state == 1 && !strcasestr(c->head, "\r\nconnection: close")) state = ask(c);
            if (state != 0) {
                lost += state < 0;
                close(c->fd);
                open_again(c);
            }
        }
    }
    double seconds = now() - begin;
    qsort(latencies, answers, sizeof *latencies, compare);
    double half = answers ? latencies[answers / 2] * 1e3 : 0, most = answers ? latencies[answers * 99 / 100] * 1e3 : 0;
    printf("{\"answers\": %ld, \"seconds\": %.4f, \"half_ms\": %.3f, \"most_ms\": %.3f, ", answers, seconds, half, most);
    printf("\"refused\": %ld, \"lost\": %ld}\n", refused, lost);
    return 0;
}
