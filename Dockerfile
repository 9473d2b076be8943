# syntax=docker/dockerfile:1
# The image has the program, its two other names and the certificates of authorities;
# no shell, no libraries, nothing to write to. Build it from the root of the repository:
#
#   docker build --build-arg VERSION="$(git describe --tags --always)" \
#     --build-arg SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)" -t storage-controller:dev .
#
# The program is the same, byte by byte, wherever it is built from the same source with the
# same version of Go: no paths, no time, no commit are written into it (-trimpath,
# -buildvcs=false). SOURCE_DATE_EPOCH gives the files and the image one time as well.
FROM --platform=$BUILDPLATFORM golang:1.26.8 AS build
ARG TARGETOS=linux
ARG TARGETARCH=amd64
ARG VERSION=dev
ARG SOURCE_DATE_EPOCH=0
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=0 GOFLAGS= GOOS=$TARGETOS GOARCH=$TARGETARCH go build -trimpath -buildvcs=false -tags grpcnotrace -ldflags "-s -w -buildid= -X main.version=$VERSION" -o /out/storage-controller ./cmd/storage-controller
RUN mkdir -p /out/etc/ssl/certs \
 && cp /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/ca-certificates.crt \
 && ln -s storage-controller /out/csi-provisioner \
 && ln -s storage-controller /out/csi-attacher \
 && find /out -exec touch --no-dereference --date=@$SOURCE_DATE_EPOCH {} +

FROM scratch
COPY --from=build /out/ /
# The number, for runAsNonRoot is checked without a list of users.
USER 65532:65532
ENTRYPOINT ["/storage-controller"]
